"""Trains the demo model: `python -m tools.demo_model.train --out DIR` (extra `train`).

The state is saved every few minutes; the same command continues from it. The batch of a step
depends on the seed and the step alone, so a continued run sees the same data as one in a piece.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import cos, pi
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor

from tools.demo_model import corpus
from tools.demo_model.chatml import END_OF_TEXT
from tools.demo_model.model import LONGEST_WINDOW, DemoModel, Shape
from tools.demo_model.tokenizer import Encoder, load_tokenizer, train_tokenizer

SEED = 20
WARMUP_STEPS = 100
STEP_TOKENS = 6144
LOG_EVERY_STEPS = 25
SAVE_EVERY_S = 180.0


@dataclass(frozen=True)
class Stage:
    """A run of steps whose windows, in tokens, take turns."""

    steps: int
    windows: tuple[int, ...]
    mixture: corpus.Mixture


@dataclass(frozen=True)
class Cycle:
    """Stages under one rise and fall of the learning rate.

    Attributes:
        peak_rate: The rate after the rise.
        fall_until_step: The step, in the cycle, that the fall would end at; stages may end before.
        stages: The stages in order.
    """

    peak_rate: float
    fall_until_step: int
    stages: tuple[Stage, ...]

    @property
    def steps(self) -> int:
        """Steps of all its stages."""
        return sum(stage.steps for stage in self.stages)


# Skills and short recall are learned fastest on short windows; recall over the whole context
# needs windows of that length, and early enough to be settled when the rate is low. The second
# cycle settles what the last mixture brought. Distances as long as the window are rare in it, so
# the third one goes beyond the context.
CYCLES = (
    Cycle(
        3e-3,
        4500,
        (
            Stage(1200, (256,), corpus.EVEN),
            Stage(582, (256, 1024), corpus.EVEN),
            Stage(618, (256, 1024), corpus.HARD),
            Stage(917, (256, 1024, 1024), corpus.HARD),
            Stage(1183, (256, 1024, 1024), corpus.COPYING),
        ),
    ),
    Cycle(1.2e-3, 1200, (Stage(971, (256, 1024, 1024, 1024), corpus.FINAL),)),
    Cycle(6e-4, 350, (Stage(350, (LONGEST_WINDOW,), corpus.FAR),)),
)
TOTAL_STEPS = sum(cycle.steps for cycle in CYCLES)


def cycle_at(step: int) -> tuple[Cycle, int]:
    """Returns the cycle of `step` and the step's number in it."""
    for cycle in CYCLES:
        if step < cycle.steps:
            return cycle, step
        step -= cycle.steps
    raise ValueError("step lies after the last cycle")


def stage_at(step: int) -> tuple[Stage, int]:
    """Returns the stage of `step` and the step's window in tokens."""
    cycle, step = cycle_at(step)
    for stage in cycle.stages:
        if step < stage.steps:
            return stage, stage.windows[step % len(stage.windows)]
        step -= stage.steps
    raise AssertionError("a cycle is as long as its stages")


def rate_at(step: int) -> float:
    """Returns the learning rate of `step`: a linear rise, then half a cosine down to 2 %."""
    cycle, step = cycle_at(step)
    if step < WARMUP_STEPS:
        return cycle.peak_rate * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (cycle.fall_until_step - WARMUP_STEPS)
    return cycle.peak_rate * (0.02 + 0.98 * 0.5 * (1 + cos(pi * progress)))


def rows(encoder: Encoder, seed: str, window: int, mixture: corpus.Mixture) -> Iterator[tuple[list[int], list[bool]]]:
    """Yields conversations as ids and learned marks, cut to `window` tokens."""
    for conversation in corpus.conversations(seed, window, encoder.length, mixture):
        ids: list[int] = []
        learned: list[bool] = []
        for message in conversation.messages:
            part, marks = encoder.message(message)
            ids += part
            learned += marks
        yield ids[:window], learned[:window]


def batch_at(encoder: Encoder, padding: int, step: int) -> tuple[Tensor, Tensor]:
    """Returns ids and learned marks, each (rows, window), of `step`."""
    stage, window = stage_at(step)
    amount = STEP_TOKENS // window
    ids = torch.full((amount, window), padding)
    learned = torch.zeros((amount, window), dtype=torch.bool)
    conversations = islice(rows(encoder, f"train:{SEED}:{step}", window, stage.mixture), amount)
    for row, (part, marks) in enumerate(conversations):
        ids[row, : len(part)] = torch.tensor(part)
        learned[row, : len(part)] = torch.tensor(marks)
    return ids, learned


def optimizer_for(model: DemoModel) -> torch.optim.AdamW:
    """Returns AdamW that decays matrices but not the norms."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def train_step(model: DemoModel, optimizer: torch.optim.AdamW, batch: tuple[Tensor, Tensor], rate: float) -> float:
    """Changes `model` by one step and returns the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(*batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.item())


@dataclass
class Run:
    """A training run and the file its state lives in."""

    path: Path
    model: DemoModel
    optimizer: torch.optim.AdamW
    step: int = 0
    trained_s: float = 0.0

    def load(self) -> None:
        """Continues from the saved state if there is one."""
        if not self.path.exists():
            return
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.trained_s = state["step"], state["trained_s"]

    def save(self) -> None:
        """Writes the state, in one piece for readers."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "trained_s": self.trained_s,
        }
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.path)


def train(run: Run, encoder: Encoder, padding: int, last_step: int, console: Console) -> None:
    """Trains until `last_step`, logging the mean loss by window and saving as it goes."""
    losses: dict[int, list[float]] = {}
    saved = before = time.monotonic()
    while run.step < last_step:
        batch = batch_at(encoder, padding, run.step)
        loss = train_step(run.model, run.optimizer, batch, rate_at(run.step))
        losses.setdefault(batch[0].shape[1], []).append(loss)
        run.step += 1
        now = time.monotonic()
        run.trained_s, before = run.trained_s + now - before, now
        if run.step % LOG_EVERY_STEPS == 0:
            means = " ".join(f"{w}:{sum(v) / len(v):.4f}" for w, v in sorted(losses.items()))
            console.print(f"step {run.step} loss {means} trained {run.trained_s:.0f} s")
            losses.clear()
        if now - saved > SAVE_EVERY_S:
            run.save()
            saved = now
    run.save()


def main(
    out: Annotated[Path, typer.Option(help="Directory of the tokenizer and the saved state.")],
    *,
    steps: Annotated[int, typer.Option(help="Stop after this step.")] = TOTAL_STEPS,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    """Trains the demo model, or continues to, and saves its state in a directory."""
    console = Console()
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer_path = out / "tokenizer.json"
    if not tokenizer_path.exists():
        train_tokenizer(SEED).save(str(tokenizer_path))
    tokenizer = load_tokenizer(tokenizer_path)
    model = DemoModel(Shape(vocabulary=tokenizer.get_vocab_size()))
    run = Run(out / "state.pt", model, optimizer_for(model))
    run.load()
    train(run, Encoder(tokenizer), tokenizer.token_to_id(END_OF_TEXT), steps, console)


if __name__ == "__main__":
    typer.run(main)
