"""Writes C++ source that holds the status page, and the Content-Security-Policy that allows its style and script.

    embed_page.py page.html > page.cc

The page must have one <style> and one <script> element; the policy names the hashes of both, and allows no others.
"""

import base64
import hashlib
import re
import sys


def source_of(page: str, element: str) -> str:
    """'sha256-...' of the text in the only `element` of the page."""
    texts = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
    if len(texts) != 1 or page.count(f"<{element}") != 1:
        sys.exit(f"the page needs exactly one <{element}>, without attributes")
    return f"'sha256-{base64.b64encode(hashlib.sha256(texts[0].encode()).digest()).decode()}'"


def literal(text: str) -> str:
    """`text` as a C++ string literal, one line of source for each line."""
    text = text.replace("\\", r"\\").replace('"', r"\"").replace("?", r"\?")
    return "\n".join(f'    "{line}\\n"' for line in text.removesuffix("\n").split("\n"))


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        page = file.read()
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {source_of(page, 'script')}",
            f"style-src {source_of(page, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    print('#include "coordinator/web/page.h"\n\nnamespace longhaul::coordinator {\n')
    print(f"const char kPageHtml[] =\n{literal(page)};\n")
    print(f'const char kPagePolicy[] =\n    "{policy}";\n')
    print("}  // namespace longhaul::coordinator")


main()
