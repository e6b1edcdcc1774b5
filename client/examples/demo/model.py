"""A small character-level GPT. It learns real text: the sources of Python's standard library."""

from __future__ import annotations

import pathlib
import sysconfig

import torch
from torch import nn
from torch.nn import functional as F

# The characters that the model knows. Every other character counts as the last one.
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127)) + "\x7f"
CONTEXT = 64
BATCH = 16
WIDTH = 128
HEADS = 4
LAYERS = 3
TEXT_BYTES = 4_000_000


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Reads two texts, as indices into ALPHABET: one to learn from, and one to judge by (every twentieth file)."""
    directory = pathlib.Path(sysconfig.get_paths()["stdlib"])
    texts: list[list[bytes]] = [[], []]
    size = 0
    for i, path in enumerate(sorted(directory.glob("*.py"))):
        texts[i % 20 == 10].append(path.read_bytes())
        size += len(texts[i % 20 == 10][-1])
        if size > TEXT_BYTES:
            break
    if size < TEXT_BYTES // 4:
        raise SystemExit(f"too little text to learn from: {size} bytes of Python sources in {directory}")
    table = torch.full((256,), len(ALPHABET) - 1, dtype=torch.uint8)
    for i, character in enumerate(ALPHABET):
        table[ord(character)] = i
    learn, judge = (table[torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8).long()] for part in texts)
    return learn, judge


def batch(text: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random passages of the text, and for each of their characters the one that follows it."""
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    passages = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return passages[:, :-1], passages[:, 1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attended = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        query, key, value = (
            part.view(rows, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.attend(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        thought: torch.Tensor = self.think(self.norm2(x))
        return x + thought


class GPT(nn.Module):
    """The model. Its initial parameters are the same in every process."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(ALPHABET), bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])
        x = self.blocks(self.characters(x) + self.positions(positions))
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())


class Local:
    """The local part of one trainer: AdamW steps on passages that this trainer chooses."""

    def __init__(self, seed: int, steps: int) -> None:
        self.text, self.judged_by = read_text()
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1)
        warmup = min(50, steps // 5 or 1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / warmup))
        self.passages = torch.Generator().manual_seed(1000 + seed)

    def train(self, steps: int) -> float:
        """Makes `steps` training steps and returns their mean loss."""
        total = 0.0
        for _ in range(steps):
            loss = self.model.loss(*batch(self.text, self.passages))
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            total += loss.item()
        return total / steps

    @torch.no_grad()
    def judge(self, batches: int = 6) -> float:
        """The loss on passages that no trainer learns from. The same passages at each call."""
        generator = torch.Generator().manual_seed(7)
        return sum(self.model.loss(*batch(self.judged_by, generator)).item() for _ in range(batches)) / batches
