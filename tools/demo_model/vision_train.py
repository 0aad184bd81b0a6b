"""Trains the demo model's vision tower: `python -m tools.demo_model.vision_train --out DIR` (extra `train`).

The language model stays as it ships. Six things are learned, one after the other:

1. Through the language model, rows after which it names a color and a figure: for each row a vector, one for each
   color and one for each figure, added up. These few numbers converge far sooner than the tower's own would.
2. The tower learns to tell colors and figures apart.
3. The tower learns to turn a picture into the rows of its color and figure.
4. Through the language model, the tower learns what its rows are still misread for, while it goes on with the third.
5. Of pictures that are turned, scaled and shifted at random, the tower learns rows that are nearer to those of the
   right color and figure than to any other. The third goal alone gives a doubtful picture the mean of two figures'
   rows, after which the language model says neither.
6. The fourth again, with the fifth beside it, in conversations that ask for a picture several times.

At last the third again with pictures varied like this, and the sixth, in the end with up to three pictures in a
conversation. What is exported is the exponential moving average of the weights. The state is saved every minute; the
same command continues from it. The batch and the random numbers of a step depend on the seed and the step alone.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import cos, pi
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from inferencecenter.demo import demo_model_path
from tools.demo_model import vision_corpus
from tools.demo_model.chatml import IM_END, IM_START, Message
from tools.demo_model.evaluate import GreedyModel
from tools.demo_model.frozen import load_frozen
from tools.demo_model.model import DemoModel
from tools.demo_model.pictures import COLORS, DIGITS, SHAPES, draw, letterbox, sentence_about
from tools.demo_model.vision import VisionShape, VisionTower
from tools.demo_model.vision_corpus import PICTURE_MARK
from tools.demo_model.world import Draw

SEED = 20
PICTURES = 120_000
WARMUP_STEPS = 50
LOG_EVERY_STEPS = 25
SAVE_EVERY_S = 60.0
_COLORS = tuple(COLORS)
_FIGURES = (*SHAPES, *DIGITS)

_ROW_NOISE = 0.05
_DIGIT_SHARE = 0.65
"""Of the pictures of the last two goals: digits are mistaken three times as often as shapes."""
_TEMPERATURE = 0.1
"""Of the decision between rows, in units of the rows' variance."""
_AVERAGE_DECAY = 0.995
_PICTURES_BESIDE = 96
_PHRASE = "Please say: "

Maker = Callable[[Draw, Sequence[str]], tuple[Message, ...]]
Classes = tuple[Tensor, Tensor]
"""Numbers of colors and of figures."""


@dataclass(frozen=True)
class VisionStage:
    """A run of steps.

    Attributes:
        goal: What is learned: "decisions" is the fifth, "recalls" the sixth, "varied rows" the third with varied
            pictures.
        steps: How many.
        batch: Conversations or pictures in a step.
        rate: The learning rate after its rise; it falls to a hundredth.
        maker: Makes the conversations, where the language model is asked.
        pictures: How many pictures a conversation has at most.
    """

    goal: Literal["targets", "classes", "rows", "answers", "decisions", "recalls", "varied rows"]
    steps: int
    batch: int
    rate: float
    maker: Maker = vision_corpus.question_alone
    pictures: int = 2


STAGES = (
    VisionStage("targets", 150, 20, 0.02),
    VisionStage("targets", 1500, 8, 0.02, vision_corpus.question_or_conversation),
    VisionStage("targets", 3000, 8, 0.01, vision_corpus.conversation),
    VisionStage("classes", 6000, 64, 2e-3),
    VisionStage("rows", 6000, 64, 1.5e-3),
    VisionStage("answers", 800, 10, 5e-4, vision_corpus.question_or_conversation),
    VisionStage("answers", 1600, 12, 6e-4, vision_corpus.question_or_conversation),
    VisionStage("decisions", 3500, 64, 8e-4),
    VisionStage("recalls", 300, 12, 3e-4, vision_corpus.question_or_recalls),
    VisionStage("varied rows", 2500, 64, 6e-4),
    VisionStage("recalls", 120, 12, 3e-4, vision_corpus.question_or_recalls),
    VisionStage("recalls", 90, 10, 3e-4, vision_corpus.recalls_or_pictures, pictures=3),
    VisionStage("recalls", 420, 10, 5e-4, vision_corpus.recalls_or_pictures, pictures=3),
)
TOTAL_STEPS = sum(stage.steps for stage in STAGES)


def stage_at(step: int) -> tuple[VisionStage, int]:
    """Returns the stage of `step` and the step's number in it."""
    for stage in STAGES:
        if step < stage.steps:
            return stage, step
        step -= stage.steps
    raise ValueError("step lies after the last stage")


def rate_at(step: int) -> float:
    """Returns the learning rate of `step`: a linear rise, then half a cosine."""
    stage, step = stage_at(step)
    if step < WARMUP_STEPS:
        return stage.rate * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (stage.steps - WARMUP_STEPS)
    return stage.rate * (0.01 + 0.99 * 0.5 * (1 + cos(pi * progress)))


class Pictures:
    """Drawn pictures, kept in a file because drawing them takes minutes."""

    def __init__(self, path: Path, amount: int, side: int) -> None:
        if not path.exists():
            drawn = [draw([SEED, number]) for number in range(amount)]
            names = [f"{each.color} {each.figure}" for each in drawn]
            np.savez(path, pixels=[letterbox(each.pixels, side) for each in drawn], names=names)
        with np.load(path) as stored:
            self.pixels: NDArray[np.uint8] = stored["pixels"]
            self.names = [tuple(str(name).split()) for name in stored["names"]]

    @cached_property
    def digits(self) -> list[int]:
        """The numbers of the pictures of digits."""
        return [number for number, (_, figure) in enumerate(self.names) if figure in DIGITS]

    def sentence(self, number: int) -> str:
        """Returns what should be said of a picture."""
        return sentence_about(*self.names[number])

    def classes(self, numbers: Sequence[int]) -> Classes:
        """Returns the numbers of the colors and of the figures of pictures."""
        named = [self.names[number] for number in numbers]
        return (
            torch.tensor([_COLORS.index(color) for color, _ in named]),
            torch.tensor([_FIGURES.index(figure) for _, figure in named]),
        )

    def batch(self, numbers: Sequence[int]) -> Tensor:
        """Returns the pixels of pictures."""
        return torch.from_numpy(self.pixels[list(numbers)])


@dataclass
class VisionBatch:
    """Conversations as tokens.

    Attributes:
        ids: Token ids, (batch, tokens).
        rows: Where rows of pictures take the place of tokens, (batch, tokens).
        learned: Whether a token counts as a target, (batch, tokens).
        pictures: The pictures in the order of their rows.
    """

    ids: Tensor
    rows: Tensor
    learned: Tensor
    pictures: list[int]


class VisionEncoder:
    """Turns messages with pictures into tokens."""

    def __init__(self, tokenize: Callable[[str], list[int]], rows: int) -> None:
        self._tokenize = tokenize
        self._rows = rows
        self._known: dict[str, list[int]] = {}

    def batch(self, conversations: Sequence[tuple[tuple[Message, ...], Sequence[int]]]) -> VisionBatch:
        """Returns conversations, each with the numbers of its pictures, as one batch."""
        encoded = [self._conversation(messages) for messages, _ in conversations]
        size = len(encoded), max(len(tokens) for tokens, _ in encoded)
        ids, nowhere = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.bool)
        batch = VisionBatch(ids, rows=nowhere, learned=nowhere.clone(), pictures=[])
        for number, ((tokens, learned), (_, pictures)) in enumerate(zip(encoded, conversations, strict=True)):
            line = torch.tensor(tokens)
            batch.ids[number, : len(tokens)] = line.clamp_min(0)
            batch.rows[number, : len(tokens)] = line < 0
            batch.learned[number, : len(tokens)] = torch.tensor(learned)
            batch.pictures += pictures[: int((line < 0).sum()) // self._rows]
        return batch

    def _conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Returns tokens, -1 for rows, and which are learned: what the assistant says once there is a picture."""
        tokens: list[int] = []
        learned: list[bool] = []
        seen = False
        for message in messages:
            head, *rest = f"{IM_START}{message.role}\n{message.content}".split(PICTURE_MARK)
            start = self._ids(f"{IM_START}assistant\n") if message.role == "assistant" else []
            body = self._ids(head)
            for text in rest:
                body = body + [-1] * self._rows + (self._ids(text) if text else [])
                seen = True
            body = body + self._ids(IM_END)
            tail = self._ids("\n")
            is_learned = seen and message.role == "assistant"
            tokens += body + tail
            learned += [False] * len(start) + [is_learned] * (len(body) - len(start)) + [False] * len(tail)
        return tokens, learned

    def _ids(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self._tokenize(text)
        return self._known[text]


class TargetRows(nn.Module):  # type: ignore[misc]
    """Rows after which the language model names a color and a figure."""

    def __init__(self, phrases: Tensor) -> None:
        """Begins with `phrases`, (colors, figures, rows, width): a request to say each name, as embeddings."""
        super().__init__()
        middle = phrases.mean((0, 1))
        self.position = nn.Parameter(middle + torch.randn_like(middle) * 0.05)
        self.color = nn.Parameter(phrases.mean(1) - middle)
        self.figure = nn.Parameter(phrases.mean(0) - middle)

    def forward(self, colors: Tensor, figures: Tensor) -> Tensor:
        """Returns the rows, (batch, rows, width), of numbers of colors and figures."""
        rows: Tensor = self.position + self.color[colors] + self.figure[figures]
        return rows


class VisionLearner(nn.Module):  # type: ignore[misc]
    """A tower that learns, with what is needed for that only."""

    def __init__(self, shape: VisionShape, language: DemoModel, targets: TargetRows) -> None:
        super().__init__()
        self.tower = VisionTower(shape, language.shape.width)
        self.color = nn.Linear(shape.width, len(_COLORS))
        self.figure = nn.Linear(shape.width, len(_FIGURES))
        self.targets = targets
        self._language = [language]  # in a list it is no part of this module, and is neither trained nor saved

    def loss_of_targets(self, classes: Classes, batch: VisionBatch) -> Tensor:
        """Returns the mean cross-entropy of the language model's answers after the target rows."""
        rows = self.targets(*classes)
        return self._loss_of_answers(rows + torch.randn_like(rows) * _ROW_NOISE, batch)

    def loss_of_answers(self, pixels: Tensor, batch: VisionBatch) -> Tensor:
        """Returns the mean cross-entropy of the language model's answers after the tower's rows."""
        return self._loss_of_answers(self.tower(pixels), batch)

    def _loss_of_answers(self, rows: Tensor, batch: VisionBatch) -> Tensor:
        (language,) = self._language
        x = language.token_embd(batch.ids)
        x[batch.rows] = rows.flatten(0, 1)
        wanted = batch.learned[:, 1:]
        states = language.states(x[:, :-1])[wanted]
        logits = functional.linear(states, language.token_embd.weight)
        return functional.cross_entropy(logits, batch.ids[:, 1:][wanted])

    def loss_of_classes(self, pixels: Tensor, classes: Classes) -> Tensor:
        """Returns how badly colors and figures are told apart."""
        return self._loss_of_features(self.tower.features(pixels), classes)

    def loss_of_rows(self, pixels: Tensor, classes: Classes) -> Tensor:
        """Returns how far the tower's rows are from the targets, and how badly classes are told apart."""
        features = self.tower.features(pixels)
        with torch.no_grad():
            targets = self.targets(*classes)
            variance = self.targets.color.var() + self.targets.figure.var()
        missed = functional.mse_loss(self.tower.project(features), targets) / variance
        return missed + 0.5 * self._loss_of_features(features, classes)

    def loss_of_decisions(self, pixels: Tensor, classes: Classes) -> Tensor:
        """Returns the loss of rows, and how badly the rows of the right color and figure are the nearest ones."""
        features = self.tower.features(pixels)
        colors, figures = self.targets.color.detach().flatten(1), self.targets.figure.detach().flatten(1)
        variance = colors.var() + figures.var()
        away = (self.tower.project(features) - self.targets(*classes).detach()).flatten(1)
        loss = (away**2).mean() / variance + 0.5 * self._loss_of_features(features, classes)
        for every, wanted in ((colors, classes[0]), (figures, classes[1])):
            # By how much farther away the rows with each other color or figure are than the right ones, squared.
            along = away @ every.T
            between = torch.cdist(every, every)[wanted] ** 2
            farther = between - 2 * (along - along.gather(1, wanted[:, None]))
            loss = loss + functional.cross_entropy(-farther / (away.shape[1] * variance * _TEMPERATURE), wanted)
        return loss

    def _loss_of_features(self, features: Tensor, classes: Classes) -> Tensor:
        pooled = features.mean(1)
        heads = (self.color(pooled), self.figure(pooled))
        return sum(functional.cross_entropy(*pair) for pair in zip(heads, classes, strict=True))


def varied(pixels: Tensor) -> Tensor:
    """Returns pictures, each turned, scaled, shifted and lightened at random."""
    amount = len(pixels)

    def within(limit: float) -> Tensor:
        return (torch.rand(amount) * 2 - 1) * limit

    angle, scale = within(0.1), 1 + within(0.08)
    turn = torch.stack([scale * angle.cos(), -scale * angle.sin(), within(0.07)], 1)
    other = torch.stack([scale * angle.sin(), scale * angle.cos(), within(0.07)], 1)
    planes = pixels.permute(0, 3, 1, 2).float()
    grid = functional.affine_grid(torch.stack([turn, other], 1), list(planes.shape), align_corners=False)
    moved = functional.grid_sample(planes, grid, padding_mode="border", align_corners=False)
    lightened = (moved + within(10)[:, None, None, None]).clamp(0, 255)
    return lightened.permute(0, 2, 3, 1)


def said_phrases(language: DemoModel, tokenize: Callable[[str], list[int]], rows: int) -> Tensor:
    """Returns a request to say each name, (colors, figures, rows, width): embeddings at the end, zeros before."""
    phrases = torch.zeros(len(_COLORS), len(_FIGURES), rows, language.shape.width)
    for i, color in enumerate(_COLORS):
        for j, figure in enumerate(_FIGURES):
            sentence = sentence_about(color, figure)
            tokens = tokenize(f"{_PHRASE}{sentence[0].lower()}{sentence[1:-1]}")
            phrases[i, j, rows - len(tokens) :] = language.token_embd(torch.tensor(tokens))
    return phrases


@dataclass
class VisionRun:
    """A training run and the file its state lives in."""

    path: Path
    learner: VisionLearner
    average: AveragedModel
    optimizer: torch.optim.AdamW
    step: int = 0
    trained_s: float = 0.0

    def load(self) -> None:
        """Continues from the saved state if there is one."""
        if not self.path.exists():
            return
        state = torch.load(self.path, weights_only=True)
        self.learner.load_state_dict(state["learner"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.trained_s = state["step"], state["trained_s"]

    def save(self) -> None:
        """Writes the state, in one piece for readers."""
        state = {
            "learner": self.learner.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "trained_s": self.trained_s,
        }
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.path)


def loss_at(step: int, learner: VisionLearner, pictures: Pictures, encoder: VisionEncoder) -> Tensor:
    """Returns the loss of the batch of `step`."""
    stage, _ = stage_at(step)
    torch.manual_seed(SEED * 1_000_000 + step)
    draws = Draw(Random(f"vision:{SEED}:{step}"))  # noqa: S311 (no secrets here)

    def number() -> int:
        if stage.goal in ("decisions", "recalls", "varied rows") and draws.chance(2 * _DIGIT_SHARE - 1):
            return draws.pick(pictures.digits)
        return draws.number(0, len(pictures.names) - 1)

    def loss_of_decisions(numbers: list[int]) -> Tensor:
        return learner.loss_of_decisions(varied(pictures.batch(numbers)), pictures.classes(numbers))

    if stage.goal == "decisions":
        return loss_of_decisions([number() for _ in range(stage.batch)])
    if stage.goal == "varied rows":
        numbers = [number() for _ in range(stage.batch)]
        return learner.loss_of_rows(varied(pictures.batch(numbers)), pictures.classes(numbers))
    pairs = [[number() for _ in range(stage.pictures)] for _ in range(stage.batch)]
    if stage.goal in ("targets", "answers", "recalls"):
        made = [(stage.maker(draws, [pictures.sentence(each) for each in pair]), pair) for pair in pairs]
        batch = encoder.batch(made)
        if stage.goal == "targets":
            return learner.loss_of_targets(pictures.classes(batch.pictures), batch)
        more = [number() for _ in range(_PICTURES_BESIDE)]
        if stage.goal == "recalls":
            return learner.loss_of_answers(varied(pictures.batch(batch.pictures)), batch) + loss_of_decisions(more)
        kept = learner.loss_of_rows(pictures.batch(more), pictures.classes(more))
        return learner.loss_of_answers(pictures.batch(batch.pictures), batch) + kept
    numbers = [numbers[0] for numbers in pairs]
    loss = learner.loss_of_classes if stage.goal == "classes" else learner.loss_of_rows
    return loss(pictures.batch(numbers), pictures.classes(numbers))


def train(run: VisionRun, pictures: Pictures, encoder: VisionEncoder, last_step: int, console: Console) -> None:
    """Trains until `last_step`, logging the mean loss and saving as it goes."""
    losses: list[float] = []
    saved = before = time.monotonic()
    while run.step < last_step:
        for group in run.optimizer.param_groups:
            group["lr"] = rate_at(run.step)
        loss = loss_at(run.step, run.learner, pictures, encoder)
        run.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(run.learner.parameters(), 1.0)
        run.optimizer.step()
        run.average.update_parameters(run.learner.tower)
        losses.append(float(loss.item()))
        run.step += 1
        now = time.monotonic()
        run.trained_s, before = run.trained_s + now - before, now
        if run.step % LOG_EVERY_STEPS == 0:
            console.print(f"step {run.step} loss {sum(losses) / len(losses):.4f} trained {run.trained_s:.0f} s")
            losses.clear()
        if now - saved > SAVE_EVERY_S:
            run.save()
            saved = now
    run.save()


def main(
    out: Annotated[Path, typer.Option(help="Directory of the pictures and the saved state.")],
    *,
    steps: Annotated[int, typer.Option(help="Stop after this step.")] = TOTAL_STEPS,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Trains the vision tower, or continues to, and saves its state in a directory."""
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    out.mkdir(parents=True, exist_ok=True)
    shape = VisionShape()
    pictures = Pictures(out / "pictures.npz", PICTURES, shape.side)
    language = load_frozen(demo_model_path())
    with GreedyModel(demo_model_path(), threads=threads) as tokenizer:
        phrases = said_phrases(language, tokenizer.tokens, shape.rows)
        learner = VisionLearner(shape, language, TargetRows(phrases))
        optimizer = torch.optim.AdamW(learner.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
        average = AveragedModel(learner.tower, multi_avg_fn=get_ema_multi_avg_fn(_AVERAGE_DECAY))
        run = VisionRun(out / "vision.pt", learner, average, optimizer)
        run.load()
        train(run, pictures, VisionEncoder(tokenizer.tokens, shape.rows), steps, Console())


if __name__ == "__main__":
    typer.run(main)
