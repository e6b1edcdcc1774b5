#!/usr/bin/env python3
"""Checks that pure code uses no clock, thread, socket, randomness or container in hash order.

Pure code computes from its inputs alone, so that a simulation can replay it exactly. Time, random bytes
and the results of slow work reach it as events.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

import sources


class Ban(NamedTuple):
    what: str
    includes: str
    words: str


CLOCK = Ban(
    "a clock",
    r"chrono$|ctime$|time\.h$|sys/time\.h$|absl/time/",
    r"\b(steady_clock|system_clock|high_resolution_clock|clock_gettime|gettimeofday|absl::Now)\b|\btime\s*\(\s*(NULL|nullptr|0)",
)
THREAD = Ban(
    "threads or locks",
    r"thread$|mutex$|shared_mutex$|condition_variable$|future$|atomic$|semaphore$|pthread\.h$|absl/synchronization/|base/(mutex|mailbox)\.h$",
    r"\bstd::(jthread|thread|mutex|atomic|async)\b|\bthread_local\b|\bpthread_\w+",
)
SYSTEM = Ban(
    "the operating system",
    r"sys/(socket|epoll|poll|eventfd|un|stat|file)\.h$|netinet/|arpa/inet\.h$|netdb\.h$|poll\.h$|unistd\.h$|fcntl\.h$|signal\.h$"
    r"|fstream$|filesystem$|base/(daemon|http)/",
    r"\b(getenv|setenv|fopen|popen|system)\s*\(|::(socket|connect|sendmsg|recvmsg|open|read|write)\s*\(",
)
RANDOM = Ban(
    "randomness",
    r"random$|sys/random\.h$|absl/random/|openssl/rand\.h$",
    r"\b(s?rand|random|drand48|getrandom|arc4random)\s*\(|\brandom_device\b|\bmt19937",
)
OUTPUT = Ban(
    "output",
    r"iostream$|cstdio$|stdio\.h$|base/log\.h$",
    r"\bstd::c(out|err|log)\b|\bf?printf\s*\(",
)
HASH_ORDER = Ban(
    "containers without order",
    r"unordered_(map|set)$|absl/container/(flat|node)_hash_",
    r"\bunordered_(multi)?(map|set)\b|\b(flat|node)_hash_(map|set)\b|\bstd::hash\b",
)


class Pure(NamedTuple):
    path: str
    bans: tuple[Ban, ...]


# Cores decide the protocol: everything is banned. The others are pure functions of their inputs
# but decide nothing by the order of a container.
PURE = [
    Pure(
        r"(coordinator|peerd)/core/|coordinator/solver/",
        (CLOCK, THREAD, SYSTEM, RANDOM, OUTPUT, HASH_ORDER),
    ),
    Pure(
        r"proto/control/messages\.h|proto/wire/",
        (CLOCK, THREAD, SYSTEM, RANDOM, OUTPUT, HASH_ORDER),
    ),
    Pure(
        r"peerd/state/(state_hash|transfer_plan)\.",
        (CLOCK, THREAD, SYSTEM, RANDOM, OUTPUT, HASH_ORDER),
    ),
    Pure(
        r"peerd/collective/",
        (CLOCK, THREAD, SYSTEM, RANDOM, OUTPUT),
    ),
]


def check(root: Path) -> tuple[int, list[sources.Finding]]:
    files = 0
    findings: list[sources.Finding] = []
    for path in sources.sources(root):
        pure = next((pure for pure in PURE if re.match(pure.path, path)), None)
        if pure is None or sources.is_test(path):
            continue
        files += 1
        text = (root / path).read_text()
        code = sources.code_only(text)
        seen = set()  # one finding a line
        for ban in pure.bans:
            for include in sources.includes(text):
                if re.match(ban.includes, include.name):
                    seen.add(include.line)
                    findings.append(
                        sources.Finding(path, include.line, f"{include.name} brings {ban.what} into a pure part")
                    )
            for match in re.finditer(ban.words, code):
                line = sources.line_of(code, match.start())
                if line not in seen:
                    seen.add(line)
                    findings.append(
                        sources.Finding(path, line, f"{match[0].strip()} brings {ban.what} into a pure part")
                    )
    return files, findings


if __name__ == "__main__":
    sys.exit(sources.main(check, "purity", "Make the impure work an action whose result comes back as an event."))
