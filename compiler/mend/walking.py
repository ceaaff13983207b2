"""The walk that ``trap`` and ``defer`` share: effects, and branches on tensors that hold them.

A branch on a tensor whose sides do nothing but print, log, warn and raise becomes straight code:
each effect under its condition. A side that ends in an exception goes first, and the other follows
unconditionally. In any other branch on a tensor, effects stay where they stand and also take its
condition (``when=``), so that the branch can be captured by running both of its sides.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compiler.mend import calls, cfg
from compiler.mend.conditions import NeedsStatement, test_sort
from compiler.mend.findings import Kind
from compiler.mend.flow import Flow
from compiler.mend.function import RUNTIME, Function, call, placed
from compiler.mend.guards import Around, Guard, SeeingThrough, both, negated
from compiler.mend.kinds import Scope, Sort
from compiler.mend.purity import Level, Purity
from compiler.mend.shapes import count_effects, holds_raise, late_names, leaves, open_ends, raises
from compiler.mend.sides import Decline
from compiler.mend.splitting import Declined, Splitter, call_later

HARMLESS = {  # contexts that neither catch exceptions nor change what printing or warning does
    *("torch.no_grad", "torch.enable_grad", "torch.inference_mode", "torch.set_grad_enabled"),
    *("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast"),
    *("torch.autograd.set_detect_anomaly", "torch.profiler.record_function"),
    *("torch.autograd.profiler.record_function", "torch.nn.attention.sdpa_kernel"),
    *("torch.autograd.graph.save_on_cpu",),
}


@dataclass
class Walker:
    """Rewrites a function's statements; ``raising``: exceptions and asserts, otherwise effects."""

    function: Function
    raising: bool
    scope: Scope = field(init=False)

    def __post_init__(self) -> None:
        self.scope = Scope(self.function)
        self.flow = Flow(self.function, self.scope)
        self.refused: set[int] = set()  # ids of the calls that have been declined
        self.late = late_names(self.function.node, self.scope)

    def run(self) -> None:
        """Walk the whole function."""
        self.function.node.body = self.block(
            self.function.node.body, Around(catching=self.function.caught)
        )

    # ── statements ──

    def block(self, body: Sequence[ast.stmt], around: Around) -> list[ast.stmt]:
        """The statements of a block, mended."""
        new: list[ast.stmt] = []
        for k, s in enumerate(body):
            rest = list(body[k + 1 :])
            if self._concerned([s, *rest]) and self._may_leave(s):
                if isinstance(s, ast.If) and self._decides(s):
                    if isinstance(s.body[-1], ast.Return) and not s.orelse:
                        return new + self._with_rest(s, rest, around)
                    ends = open_ends(s)
                    if rest and len(ends) == 1:
                        ends[0].extend(rest)
                        return new + self.statement(s, around)
                new += self.statement(s, around)
                around = around.refusing("follows a branch on a tensor that may leave")
            else:
                new += self.statement(s, around)
        return new

    def _may_leave(self, s: ast.stmt) -> bool:
        """Whether a tensor may decide that what follows a statement is not run."""
        return any(
            isinstance(n, ast.If | ast.While) and leaves(n) and self._decides(n)
            for n in cfg.own_nodes([s])
        )

    def _with_rest(self, s: ast.If, rest: list[ast.stmt], around: Around) -> list[ast.stmt]:
        """A branch that returns, whose other side is the rest of the block."""
        s.orelse = rest
        new = self._if(s, around)
        if new[-1] is not s:
            return new
        rest, s.orelse = s.orelse, []
        return new + rest

    def statement(self, s: ast.stmt, around: Around) -> list[ast.stmt]:
        """What a statement becomes."""
        match s:
            case ast.Expr() if not self.raising and calls.effect(s.value, self.scope):
                return self._reported(s, around)
            case ast.Assert() if self.raising:
                return self._assert(s, around)
            case ast.If():
                return self._if(s, around)
            case ast.For() | ast.While():
                s.body, s.orelse = self.block(s.body, around), self.block(s.orelse, around)
            case ast.With():
                s.body = self.block(s.body, self._within(s, around))
            case ast.Try() | ast.TryStar():
                inside = copy.copy(around)
                inside.catching = bool(s.handlers) or around.catching or bool(s.finalbody)
                s.body = self.block(s.body, inside)
                after = copy.copy(around)
                after.handling = True
                for handler in s.handlers:
                    handler.body = self.block(handler.body, after)
                s.orelse = self.block(s.orelse, around)
                s.finalbody = self.block(s.finalbody, after)
            case ast.Match():
                for case in s.cases:
                    case.body = self.block(case.body, around)
        return [s]

    def _within(self, s: ast.With, around: Around) -> Around:
        for item in s.items:
            context = item.context_expr
            full = self.scope.dotted(context.func if isinstance(context, ast.Call) else context)
            if full not in HARMLESS:
                return around.refusing(f"stands in a context of its own: {ast.unparse(context)}")
        return around

    def _reported(self, s: ast.Expr, around: Around) -> list[ast.stmt]:
        """An effect that stands by itself."""
        assert isinstance(s.value, ast.Call)
        kind = calls.effect(s.value, self.scope)
        assert kind is not None
        try:
            new = self._effect(s, self._when(around), around)
        except Declined as reason:
            self.function.declined(s.value, kind, str(reason))
            self.refused.add(id(s.value))
            return [s]
        self.function.mended(s.value, kind, "defer")
        return [new]

    def _assert(self, s: ast.Assert, around: Around) -> list[ast.stmt]:
        if not self._decides(s):
            return [s]
        try:
            bad = negated(self._condition(s, always=not around.guards))
            when = self._when(around)
            if when is not None:
                bad = both(when, bad)
            self._allowed(around, s)
            splitter = self._splitter(lazily=True)
            raised = calls.assertion(s, splitter)
            new = self._call("trap", raised, splitter, s, bad)
        except Declined as reason:
            self.function.declined(s, Kind.ASSERT, str(reason))
            return [s]
        self.function.mended(s, Kind.ASSERT, "trap")
        if self.function.names is not None:  # alive: whether asserts count is known
            return [new] if __debug__ else [s]
        return [placed(ast.If(ast.Name("__debug__", ast.Load()), [new], []), s)]

    # ── branches ──

    def _if(self, s: ast.If, around: Around) -> list[ast.stmt]:
        if not self._decides(s) or not self._concerned([*s.body, *s.orelse]):
            s.body, s.orelse = self.block(s.body, around), self.block(s.orelse, around)
            return [s]
        try:
            test = self._condition(s, always=not around.guards)
        except Declined as reason:
            return self._left(s, around, str(reason))
        before = len(self.function.findings), dict(self.function.sites)
        try:
            return self._straight(s, test, around)
        except Declined as reason:
            del self.function.findings[before[0] :]
            self.function.sites = before[1]
            why = str(reason)
        return self._kept(s, test, around, why)

    def _straight(self, s: ast.If, test: ast.expr, around: Around) -> list[ast.stmt]:
        """Straight code for a branch. Raises Declined."""
        sides = [s.body, s.orelse]
        ends = [bool(side) and raises(side) for side in sides]
        if self.raising and not any(holds_raise(side) for side in sides):
            raise Declined("")  # for the other pass
        first = 1 if ends[1] and not ends[0] else 0
        self._check_side(sides[first])
        names = self._named(s, test, count=count_effects(sides[first]) + bool(sides[1 - first]))
        then = names.test if first == 0 else negated(names.test)
        new = names.before + self._side(sides[first], then, around)
        if ends[first]:
            return new + self.block(sides[1 - first], around)
        self._check_side(sides[1 - first])
        return new + self._side(sides[1 - first], negated(names.again()), around)

    def _named(self, s: ast.If, test: ast.expr, count: int) -> _Named:
        """The condition, under a name if it is used more than once."""
        if count <= 1 or isinstance(test, ast.Name):
            return _Named(test, [])
        name = self.function.fresh("when")
        assign = placed(ast.Assign([ast.Name(name, ast.Store())], test), s.test)
        return _Named(placed(ast.Name(name, ast.Load()), s.test), [assign])

    def _check_side(self, side: Sequence[ast.stmt]) -> None:
        """Refuse a side that does more than print, log, warn and raise."""
        for s in side:
            match s:
                case ast.Expr() if calls.effect(s.value, self.scope) or isinstance(
                    s.value, ast.Constant
                ):
                    pass
                case ast.Raise() | ast.Pass():
                    pass
                case ast.If():
                    self._check_side(s.body)
                    self._check_side(s.orelse)
                case ast.Assign(targets=[ast.Name()]) if raises(side):
                    pass
                case _:
                    raise Declined("stands in a branch that does more")

    def _side(
        self, side: Sequence[ast.stmt], when: ast.expr, around: Around,
        replacing: dict[str, ast.expr] | None = None,
    ) -> list[ast.stmt]:  # fmt: skip
        """A side's effects, each under a condition in tensor form. Raises Declined."""
        new: list[ast.stmt] = []
        replacing = dict(replacing or {})
        for s in side:
            match s:
                case ast.Assign(targets=[ast.Name(id=name)]):
                    replacing[name] = _Replacing(replacing).visit(copy.deepcopy(s.value))
                case ast.Expr(value=ast.Call()):
                    total = self._total(when, around)
                    new.append(self._effect(s, total, around, replacing))
                    kind = calls.effect(s.value, self.scope)
                    assert kind is not None
                    self.function.mended(s.value, kind, "defer")
                case ast.Raise():
                    new.append(self._raise(s, self._total(when, around), around, replacing))
                    self.function.mended(s, Kind.RAISE, "trap")
                    return new
                case ast.If():
                    inner = self._condition(s, always=False)
                    for guard, part in ((inner, s.body), (negated(inner), s.orelse)):
                        if part:
                            deeper = both(copy.deepcopy(when), copy.deepcopy(guard))
                            new += self._side(part, deeper, around, replacing)
            when = copy.deepcopy(when)
        return new

    def _kept(self, s: ast.If, test: ast.expr, around: Around, why: str) -> list[ast.stmt]:
        """A branch that stays, whose effects take its condition."""
        guard = Guard(test)
        inside = copy.copy(around)
        inside.guards = (*around.guards, guard)
        s.body = self._ended(s.body, inside, why)
        guard.holds = False
        s.orelse = self._ended(s.orelse, inside, why)
        if not guard.name:
            return [s]
        assign = placed(ast.Assign([ast.Name(guard.name, ast.Store())], guard.test), s.test)
        s.test = placed(ast.Name(guard.name, ast.Load()), s.test)
        return [assign, s]

    def _ended(self, side: list[ast.stmt], around: Around, why: str) -> list[ast.stmt]:
        if self.raising:
            for s in side:
                if isinstance(s, ast.Raise):
                    self.function.declined(s, Kind.RAISE, why)
        return self.block(side, around)

    def _left(self, s: ast.If, around: Around, why: str) -> list[ast.stmt]:
        """A branch whose condition has no tensor form: nothing in it can be mended."""
        inside = around.refusing(why)
        s.body = self._ended(s.body, inside, why)
        s.orelse = self._ended(s.orelse, inside, why)
        return [s]

    def _concerned(self, body: Sequence[ast.stmt]) -> bool:
        """Whether statements hold anything for this pass."""
        for node in cfg.own_nodes(body):
            match node:
                case ast.Raise() | ast.Assert() if self.raising:
                    return True
                case ast.Expr() if not self.raising and calls.effect(node.value, self.scope):
                    return True
        return False

    # ── effects ──

    def _effect(
        self, s: ast.Expr, when: ast.expr | None, around: Around,
        replacing: dict[str, ast.expr] | None = None,
    ) -> ast.stmt:  # fmt: skip
        assert isinstance(s.value, ast.Call)
        self._allowed(around)
        kind = calls.effect(s.value, self.scope)
        assert kind is not None
        handles = isinstance(s.value.func, ast.Attribute) and s.value.func.attr == "exception"
        if around.handling and handles:
            raise Declined("logs the exception that is being handled")
        splitter = self._splitter(lazily=when is not None, replacing=replacing)
        later = calls.body(s.value, kind, splitter)
        return self._call("emit", later, splitter, s, when)

    def _raise(
        self, s: ast.Raise, when: ast.expr, around: Around, replacing: dict[str, ast.expr]
    ) -> ast.stmt:
        self._allowed(around, s)
        splitter = self._splitter(lazily=True, replacing=replacing)
        return self._call("trap", calls.error(s, splitter), splitter, s, when)

    def _call(
        self, helper: str, later: ast.expr, splitter: Splitter, s: ast.stmt, when: ast.expr | None
    ) -> ast.stmt:
        """``_mend.emit(site, values...)`` or ``_mend.trap(when, site, values...)``."""
        values = splitter.values
        lazy = [n for n, v in values.items() if when is not None and not _ready(v)]
        order = [n for n in values if n not in lazy] + lazy
        site = self.function.site(call_later(order, later, s), "site")
        keywords: dict[str, ast.expr] = {}
        if when is not None and helper == "emit":
            keywords["when"] = when
        if lazy:
            empty = ast.arguments([], [], None, [], [], None, [])
            computed = ast.Tuple([values[n] for n in lazy], ast.Load())
            keywords["given"] = placed(ast.Lambda(empty, computed), s)
        first = [when] if when is not None and helper == "trap" else []
        at_once = [values[n] for n in order if n not in lazy]
        return placed(ast.Expr(call(helper, *first, site, *at_once, at=s, **keywords)), s)

    def _splitter(self, lazily: bool, replacing: dict[str, ast.expr] | None = None) -> Splitter:
        splitter = Splitter(self.function, self.scope, lazily, self.late)
        splitter.replacing = dict(replacing or {})
        return splitter

    def _allowed(self, around: Around, raising: ast.stmt | None = None) -> None:
        """Refuse where an effect, or a statement that raises, must stay as it is."""
        if around.refusal:
            raise Declined(around.refusal)
        if raising is None:
            return
        if around.catching:
            raise Declined("is raised inside of a try")
        changed = self.flow.changed_outside(raising)
        if changed:  # front ends replay what was changed once the graph has run
            raise Declined(f"{changed} is changed before it, which a graph that raises would lose")

    def _when(self, around: Around) -> ast.expr | None:
        """The conditions of the branches around, as one; names them."""
        whole: ast.expr | None = None
        for guard in around.guards:
            guard.name = guard.name or self.function.fresh("when")
            part: ast.expr = placed(ast.Name(guard.name, ast.Load()), guard.test)
            part = part if guard.holds else negated(part)
            whole = part if whole is None else both(whole, part)
        return whole

    def _total(self, when: ast.expr, around: Around) -> ast.expr:
        outer = self._when(around)
        return copy.deepcopy(when) if outer is None else both(outer, copy.deepcopy(when))

    def _decides(self, s: ast.If | ast.While | ast.Assert) -> bool:
        """Whether a tensor decides, or, where objects are alive to tell in the end, may decide."""
        sort = test_sort(s.test, self.flow.sorts(s), self.scope)
        return sort is not Sort.PYTHON and (
            sort is not Sort.UNKNOWN or self.function.names is not None
        )

    def _condition(self, s: ast.If | ast.Assert, always: bool) -> ast.expr:
        """The condition, in a form that is a tensor where it depends on one. Raises Declined.

        ``always``: control comes to it in any case; otherwise it must be free of effects.
        """
        if not always:
            effect = Purity(self.flow).expression(s.test, self.flow.sorts(s))
            numbers = SeeingThrough(self.flow, s).only_numbers(s.test)
            if effect.level >= Level.RAISING and not numbers:
                raise Declined(f"its condition may only be computed in its branch: {effect.reason}")
        for node in ast.walk(s.test):
            if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
                raise Declined(f"its condition evaluates {ast.unparse(node)}")
        try:
            return SeeingThrough(self.flow, s).test(copy.deepcopy(s.test))
        except (Decline, NeedsStatement) as reason:
            raise Declined(str(reason)) from None


class _Replacing(ast.NodeTransformer):
    """Names replaced by the expressions that they stand for."""

    def __init__(self, replacing: Mapping[str, ast.expr]) -> None:
        self.replacing = replacing

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.replacing.get(node.id, node))


@dataclass
class _Named:
    test: ast.expr
    before: list[ast.stmt]

    def again(self) -> ast.expr:
        return copy.deepcopy(self.test)


def _ready(value: ast.expr) -> bool:
    """Whether a value may be computed where the effect's condition does not hold."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=runtime), attr="place")):
            return runtime == RUNTIME
    return isinstance(value, ast.Name)
