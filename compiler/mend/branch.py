"""One branch on a tensor, made into a choice between two functions; or why it cannot be."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compiler.mend import cfg
from compiler.mend.conditions import Conditions
from compiler.mend.findings import Kind
from compiler.mend.function import call, placed
from compiler.mend.history import to_repeat
from compiler.mend.kinds import Sort, sort_of
from compiler.mend.loops import place
from compiler.mend.masks import has_effects, mask, masked
from compiler.mend.purity import Effect, Level, Purity
from compiler.mend.returns import MOST_STATEMENTS, holds, leaves
from compiler.mend.sides import (
    MAY_BE_TENSORS,
    Decline,
    Operands,
    changed,
    choice,
    in_order,
    loads,
    name_for,
    part,
    side,
    stores,
    tensor_chains,
)

if TYPE_CHECKING:
    from compiler.mend.where import Attempt


class Branch:
    """One ``if`` statement on a tensor, number ``i`` of the statements of ``body``."""

    def __init__(self, attempt: Attempt, s: ast.If, body: list[ast.stmt], i: int) -> None:
        self.attempt, self.s, self.body, self.i = attempt, s, body, i
        self.flow, self.function = attempt.flow, attempt.function
        self.sort: Sort = s.sort  # type: ignore[attr-defined]

    def mend(self) -> None:
        """Replace the branch by a choice between two functions; raises Decline."""
        s = self.s
        for one in (s.body, s.orelse):
            self.attempt.refuse_leftovers(one)
        returns = holds([s], ast.Return)
        if holds([s], (ast.Break, ast.Continue)):
            raise Decline("leaves or goes on with a loop around it")
        if returns and not (leaves(s.body) and leaves(s.orelse)):
            raise Decline("returns from inside a loop, with or try statement around it")
        fresh = self.flow.fresh_names(s)
        effect = self._effect(fresh)
        conditions = Conditions(self.flow, s)
        test = conditions.test(copy.deepcopy(s.test))
        if returns:
            self._check_returns()
            outputs = None
        else:
            outputs = self._outputs(fresh)
            if outputs is None:
                return  # statements that follow were taken in: the branch comes again
        self._replace(test, outputs, effect, fresh)
        how = "cond" if effect.level > Level.GATED else "where"
        self.function.mended(s, getattr(s, "kind", Kind.BRANCH), how)
        for tree, inner_how in conditions.done:
            self.function.mended(tree, Kind.BRANCH, inner_how)
        for tree in conditions.seen:
            self.function.mended(tree, Kind.ITEM, "where")

    # ── conditions ──

    def _effect(self, fresh: set[str]) -> Effect:
        purity = Purity(self.flow, fresh)
        effect = purity.suite(self.s.body) | purity.suite(self.s.orelse)
        if effect.level is Level.IMPURE:
            raise Decline(effect.reason)
        if effect.masked and effect.level > Level.GATED:
            raise Decline(f"prints, logs or raises, and {effect.reason}")
        for one in (self.s.body, self.s.orelse):
            if not masked(one, self.s.test, self.function.node.body):
                raise Decline("prints, logs or raises")
        return effect

    def _check_returns(self) -> None:
        """Both sides must return tensors, or the same Python value."""
        found: list[tuple[str, Sort]] = []
        for node in cfg.own_nodes([*self.s.body, *self.s.orelse]):
            if isinstance(node, ast.Return):
                value = node.value
                if value is None:
                    found.append(("None", Sort.PYTHON))
                else:
                    found.append(
                        (ast.unparse(value), sort_of(value, self.flow.sorts(node), self.flow.scope))
                    )
        python = {text for text, sort in found if sort in (Sort.PYTHON, Sort.ITEM, Sort.MODULE)}
        if python and (len(python) > 1 or any(s in (Sort.TENSOR, Sort.OBJECT) for _, s in found)):
            raise Decline(f"returns a Python value, {min(python)}, that depends on a tensor")

    def _outputs(self, fresh: set[str]) -> list[str] | None:
        """The names that the sides give values to, and that are read afterwards.

        None: some are Python values, and the statements that read them were taken into the sides.
        """
        s = self.s
        bound = cfg.assigned(s.body) | cfg.assigned(s.orelse)
        bound |= (changed(self.flow, s.body) | changed(self.flow, s.orelse)) & fresh
        wanted = bound & self.flow.live_after(s)
        if wanted & cfg.declared(self.function.node):
            raise Decline("assigns to a global or nonlocal name")
        names = in_order(wanted, [*s.body, *s.orelse])
        sorts: dict[str, set[Sort]] = {name: set() for name in names}
        for one in (s.body, s.orelse):
            end = part(self.flow, one, names, s)
            for name in names:
                if name not in end.bound_at_end():
                    raise Decline(f"{name} may have no value afterwards")
                sorts[name].add(end.sorts_at_end().get(name, Sort.UNKNOWN))
        python = [n for n in names if not _selectable(sorts[n])]
        if python:
            self._take_in(python)
            return None
        self.attempt.refuse_changes(s, names, self.flow.fresh_names())
        return names

    def _take_in(self, python: list[str]) -> None:
        """Move the statements that read Python values, which depend on the branch, into it."""
        rest = self._readers(set(python), self.body, self.i)
        if rest is None:  # they are read beyond the suite: bring those statements into it first
            self._bring_in(set(python), self.body)
            return
        copies = self._moved(rest, self.body, self.i)
        if has_effects(rest):
            self._under_condition(rest, copies)
        self.s.body = [*_without_pass(self.s.body), *rest]
        self.s.orelse = [*_without_pass(self.s.orelse), *copies]
        self.attempt.done.discard(id(self.s))
        self.attempt.altered.add(place(self.s))

    def _readers(self, python: set[str], body: list[ast.stmt], i: int) -> list[ast.stmt] | None:
        """The statements after ``body[i]`` that read names; None: there are more beyond."""
        for j in range(i + 1, len(body)):
            if not python & self.flow.live_after(body[j]):
                rest = body[i + 1 : j + 1]
                if not holds(rest, ast.Return):
                    return rest
                rest = body[i + 1 :]
                return rest if leaves(rest) else None
        return None

    def _moved(self, rest: list[ast.stmt], body: list[ast.stmt], i: int) -> list[ast.stmt]:
        """Take ``rest``, which follows ``body[i]``, out of the suite; a copy of it."""
        size = sum(
            isinstance(n, ast.stmt) for r in (self.function.node, *rest) for n in ast.walk(r)
        )
        if size > MOST_STATEMENTS:
            raise Decline("what reads a Python value that depends on it is too long to copy")
        del body[i + 1 : i + 1 + len(rest)]
        return copy.deepcopy(rest)

    def _bring_in(self, python: set[str], body: list[ast.stmt]) -> None:
        """Move what follows the branch around a suite into its sides, and come again."""
        found = self.attempt.around(body)
        reason = f"{min(python)} is a Python value that depends on a tensor"
        if found is None:
            raise Decline(reason)
        parent, outer, i = found
        rest = self._readers(python, outer, i)
        if rest is None:
            self._bring_in(python, outer)
            return
        if has_effects(rest) and getattr(parent, "sort", Sort.PYTHON) is not Sort.PYTHON:
            raise Decline(reason)
        copies = self._moved(rest, outer, i)
        for one, part_ in ((parent.body, rest), (parent.orelse, copies)):
            if not leaves(one):
                one.extend(part_)
        for s in (parent, self.s):
            self.attempt.done.discard(id(s))
            self.attempt.altered.add(place(s))

    def _under_condition(self, then: list[ast.stmt], other: list[ast.stmt]) -> None:
        """Put effects of statements copied into both sides under the condition of each."""
        s = self.s
        yes, no = self.function.fresh("taken"), self.function.fresh("not_taken")
        test = call("truth", Conditions(self.flow, s).test(s.test), at=s)
        s.test = placed(_load(yes), s)
        self.body[self.i : self.i] = [
            placed(ast.Assign([stores([yes])], test), s),
            placed(ast.Assign([stores([no])], call("negate", _load(yes), at=s)), s),
        ]
        mask(then, yes)
        mask(other, no)

    # ── rewriting ──

    def _replace(
        self, test: ast.expr, outputs: list[str] | None, effect: Effect, fresh: set[str]
    ) -> None:
        s = self.s
        effect |= self._repeat(outputs, fresh)
        expressions = self._expressions(outputs)
        operands = self._operands(outputs, effect)
        if expressions is not None:
            read = set().union(*(cfg.names(t)[0] for t in expressions)) & self.flow.scope.locals
            sure = read <= self.flow.bound_before(s)  # else evaluating one could raise
            if effect.level is Level.FREE and (self.sort is Sort.UNKNOWN or not sure):
                effect |= Effect(Level.GATED)
            made = choice(self.function, test, *expressions, effect, operands, s)
            new = []
        else:
            if effect.level is Level.FREE:
                effect |= Effect(Level.GATED)
            bodies = [self._owning(one, operands, fresh) for one in (s.body, s.orelse)]
            names = [self.function.fresh(stem) for stem in ("then", "else")]
            new = [
                side(name, one, operands, outputs, effect, s)
                for name, one in zip(names, bodies, strict=True)
            ]
            helper = "both" if effect.level <= Level.GATED else "cond"
            made = call(helper, test, *map(_load, names), *operands.arguments(), at=s)
        end: ast.stmt
        if outputs is None:
            end = ast.Return(made)
        elif outputs:
            end = ast.Assign([stores(outputs)], made)
        else:
            end = ast.Expr(made)
        end = placed(end, s)
        self.attempt.finished(end)
        self.body[self.i : self.i + 1] = [*new, end]

    def _repeat(self, outputs: list[str] | None, fresh: set[str]) -> Effect:
        """Compute again in the sides what has no finite gradient, so that it can be masked."""
        effect = Effect()
        for one in (self.s.body, self.s.orelse):
            read = part(self.flow, one, outputs or [], self.s).live_at_start()
            again = to_repeat(self.flow, self.body, self.i, read, fresh)
            if again:
                one[:0] = copy.deepcopy(again)
                effect = Effect(Level.GATED, "repeats")
        return effect

    def _expressions(self, outputs: list[str] | None) -> tuple[ast.expr, ast.expr] | None:
        """The sides as expressions, where each is one assignment or return."""
        found: list[ast.expr] = []
        for one in (self.s.body, self.s.orelse):
            match _without_pass(one):
                case [ast.Return(value=ast.expr() as value)] if outputs is None:
                    found.append(value)
                case [ast.Assign(targets=[ast.Name(id=name)], value=value)] if outputs == [name]:
                    found.append(value)
                case [] if outputs is not None and len(outputs) == 1:
                    found.append(loads(outputs))
                case _:
                    return None
        return found[0], found[1]

    def _operands(self, outputs: list[str] | None, effect: Effect) -> Operands:
        s, flow = self.s, self.flow
        read: set[str] = set()
        bound = cfg.assigned(s.body) | cfg.assigned(s.orelse)
        bound |= changed(flow, s.body) | changed(flow, s.orelse)
        for one in (s.body, s.orelse):
            read |= part(flow, one, outputs or [], s).live_at_start()
        env = flow.sorts(s)
        names = []
        for name in in_order(read & flow.scope.locals, [*s.body, *s.orelse]):
            if name not in flow.bound_before(s):
                if name in bound:
                    raise Decline(f"{name} may have no value yet")
            elif name in bound or env.get(name, Sort.UNKNOWN) in MAY_BE_TENSORS:
                names.append(name)
        chains: list[str] = []
        if effect.level is Level.GATED:
            chains = tensor_chains([*s.body, *s.orelse], env, flow.scope, bound)
        return Operands(names, {c: name_for(self.function, c) for c in chains})

    def _owning(self, one: list[ast.stmt], operands: Operands, fresh: set[str]) -> list[ast.stmt]:
        """The side, working on copies of the tensors that it changes in place."""
        env = self.flow.sorts(self.s)
        names = sorted(changed(self.flow, one) & set(operands.names) & fresh)
        copies: list[ast.stmt] = [
            placed(ast.Assign([stores([n])], call("copied", _load(n), at=one[0])), one[0])
            for n in names
            if env.get(n) is not Sort.PYTHON
        ]
        return [*copies, *one]


def _selectable(sorts: set[Sort]) -> bool:
    return sorts <= {Sort.TENSOR, Sort.UNKNOWN} or sorts <= {Sort.OBJECT, Sort.UNKNOWN}


def _without_pass(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    return [s for s in body if not isinstance(s, ast.Pass)]


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())
