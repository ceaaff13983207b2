"""Random functions that print, log, warn, raise and assert in nested branches and loops."""

from __future__ import annotations

import random

HEAD = """\
import logging, warnings
import torch

logger = logging.getLogger("random")


def helper(t: torch.Tensor) -> torch.Tensor:
    if t.sum() > 3:
        warnings.warn(f"helper {t.sum()}", stacklevel=2)
    if t.max() > 12:
        raise OverflowError(t.max())
    return t + 1


def f(x: torch.Tensor, flag: bool, n: int) -> torch.Tensor:
    y = x * 1.0
"""


class Program:
    """One program, by its seed; ``text()`` is a file with a function ``f(x, flag, n)``."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.count = 0

    def text(self) -> str:
        return HEAD + "\n".join(self.block(1) + self.block(1)) + "\n    return y\n"

    def block(self, depth: int) -> list[str]:
        lines = []
        for _ in range(self.draw.randint(1, 3)):
            made = self.statement(depth)
            lines += ["    " + line if depth == 1 else line for line in made]
            if made[-1].startswith(("return", "raise")):
                break
        return lines if depth == 1 else ["    " + line for line in lines]

    def statement(self, depth: int) -> list[str]:
        """The lines of a statement, as they stand at the left margin."""
        kind = self.draw.randrange(10)
        if kind < 3:
            return [self.effect()]
        if kind == 3:
            return [self.draw.choice(["y = y * 2 + x", "x = x - y", "y = helper(y)", "n = n + 1"])]
        if kind == 4:
            return ["y = y.clone()", "y.add_(1)"]
        if kind == 5:
            return [f"assert {self.condition()}, {self.text_of()}"]
        if kind == 6:
            return [f"if {self.condition()}:", f"    raise ValueError({self.text_of()}) from None"]
        if depth > 3:
            return self.draw.choice([["return y"], ["pass"], [f"raise KeyError({self.text_of()})"]])
        if kind == 7:
            way = self.draw.choice(["break", "continue"])
            leave = [f"    if {self.condition()}:", f"        {self.effect()}", f"        {way}"]
            return ["for k in range(2):", *self.block(depth + 1), *leave, f"    {self.effect()}"]
        lines = [f"if {self.condition()}:", *self.block(depth + 1)]
        if self.draw.random() < 0.3:
            lines += [f"elif {self.condition()}:", *self.block(depth + 1)]
        if self.draw.random() < 0.4:
            lines += ["else:", *self.block(depth + 1)]
        return lines

    def condition(self, deep: bool = True) -> str:
        name, number = self.draw.choice("xy"), self.draw.choice([-3, -1, 0, 1, 2, 5])
        made = [
            f"{name}.sum() > {number}", f"({name} < {number}).any()",
            f"not ({name} >= {number}).all()", f"{name}.mean().item() < {number}",
            f"{number} < {name}.max() < {number + 3}", "flag", "n > 2",
        ]  # fmt: skip
        if deep:
            parts = self.condition(False), self.condition(False)
            made += ["({} and {})".format(*parts), "({} or {})".format(*parts)]
        return self.draw.choice(made)

    def text_of(self) -> str:
        name = self.draw.choice("xy")
        self.count += 1
        forms = [f'f"m# {{{name}.sum():.2f}}"', f'"m# %s" % {name}.mean()', '"m#"',
                 f'f"m# {{{name}.max().item():.1f}} {{n}}"']  # fmt: skip
        return self.draw.choice(forms).replace("#", str(self.count))

    def effect(self) -> str:
        calls = ["print({})", "print({}, x, n, flag, sep='|')", "logger.info({})",
                 "logger.debug({})", "warnings.warn({})"]  # fmt: skip
        return self.draw.choice(calls).format(self.text_of())
