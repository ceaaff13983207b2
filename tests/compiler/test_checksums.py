"""Verified kernels and ``checksums=True``: the same results, every flip found, no false alarm."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import compiler
from compiler.kernels import checked, embedding_bag, linear, mlp
from compiler.kernels.bags import BagError, Bags
from compiler.kernels.checked import Corruption
from compiler.saved import PackageError
from tests.compiler.test_backend import BASE, batch, model_of

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    """One bit of one number, in memory, unseen by PyTorch."""
    words = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    raw = tensor.detach().reshape(-1).view(words).numpy()
    raw.view(np.dtype(f"u{tensor.element_size()}"))[place] ^= 1 << bit


@st.composite
def lookups(draw):
    """Tables and bags of all kinds: empty bags, repeated ids, weights, padding, one row."""
    seed = draw(st.integers(0, 2**31))
    torch.manual_seed(seed)
    dtype, width = draw(DTYPES), draw(st.sampled_from([1, 3, 16, 17, 64, 130]))
    mode, size = (
        draw(st.sampled_from(["sum", "mean", "max"])),
        draw(st.sampled_from([0, 1, 5, 600])),
    )
    count, wide = draw(st.integers(1, 3)), draw(st.sampled_from([torch.int32, torch.int64]))
    tables, ids, offsets, weights = [], [], [], []
    for _ in range(count):
        rows = draw(st.sampled_from([1, 2, 40]))
        tables.append(torch.randn(rows, width).to(dtype))
        lengths = torch.randint(0, 4, (size,))
        n = int(lengths.sum())
        ids.append(torch.randint(0, rows, (n,), dtype=wide))
        offsets.append(torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(wide))
        weights.append(torch.randn(n))
    weighted = mode == "sum" and draw(st.booleans())
    padding = [draw(st.sampled_from([None, 0])) for _ in range(count)]
    bags = Bags(ids, offsets, mode=mode, weights=weights if weighted else None, padding=padding,
                include_last_offset=True)  # fmt: skip
    return tables, bags, size, width, dtype


@settings(max_examples=40)
@given(given_=lookups(), threads=st.integers(1, 3))
def test_bags_are_the_same_bits_and_raise_no_alarm(given_, threads):
    tables, bags, size, width, dtype = given_
    torch.set_num_threads(threads)
    plain, verified = (torch.full((size, len(tables), width), 7.0, dtype=dtype) for _ in range(2))
    embedding_bag.pool_into(plain, tables, bags)
    checked.pool_into(verified, tables, bags, [checked.table_sums(t) for t in tables])
    assert torch.equal(plain, verified)


@settings(max_examples=40)
@given(given_=lookups(), seed=st.integers(0, 2**31))
def test_any_bit_of_any_row_that_is_read(given_, seed):
    tables, bags, size, width, dtype = given_
    rng = np.random.default_rng(seed)
    sums = [checked.table_sums(t) for t in tables]
    out = torch.empty(size, len(tables), width, dtype=dtype)
    f = int(rng.integers(len(tables)))
    read = [i for i in bags.ids[f].tolist() if i != bags.padding_of(f, len(tables[f]))]
    unread = sorted(set(range(len(tables[f]))) - set(read))
    place, bit = int(rng.integers(width)), int(rng.integers(8 * tables[f].element_size()))
    if unread:
        flip(tables[f], unread[0] * width + place, bit)
        checked.pool_into(out, tables, bags, sums)  # nobody reads it
        flip(tables[f], unread[0] * width + place, bit)
    if read:
        row = int(rng.choice(read))
        flip(tables[f], row * width + place, bit)
        with pytest.raises(Corruption, match=f"row {row} ") as found:
            checked.pool_into(out, tables, bags, sums)
        assert (found.value.kind, found.value.table, found.value.place) == ("row", f, row)


def test_a_row_that_is_read_many_times_does_not_cancel_itself():
    table, out = torch.randn(3, 16), torch.empty(256, 1, 16)
    sums = [checked.table_sums(table)]
    for times in (2, 4, 16, 64, 128, 255, 256):
        ids = torch.cat([torch.zeros(times), torch.ones(256 - times)]).long()
        bags = Bags([ids], [torch.arange(256)])
        for bit in (7, 15, 23, 31):
            flip(table, 5, bit)
            with pytest.raises(Corruption, match="row 0 "):
                checked.pool_into(out, [table], bags, sums)
            flip(table, 5, bit)


def test_negative_zeros_infinities_and_denormals_are_data():
    table = torch.tensor([[-0.0, 0.0], [float("inf"), 1.0], [float("nan"), -1.0], [1e-42, 3e38]])
    out = torch.empty(5, 1, 2)
    bags = Bags([torch.tensor([0, 1, 2, 3, 3])], [torch.arange(5)])
    checked.pool_into(out, [table], bags, [checked.table_sums(table)])
    assert torch.equal(out[0, 0], table[0] + 0) and torch.isinf(out[1, 0, 0])
    assert checked.table_sums(table).largest == float("inf")


def test_bad_ids_are_told_before_corruption():
    table = torch.randn(4, 8)
    sums = [checked.table_sums(table)]
    flip(table, 0, 30)
    bags = Bags([torch.tensor([0, 9])], [torch.arange(2)])
    with pytest.raises(BagError, match="id 9"):
        checked.pool_into(torch.empty(2, 1, 8), [table], bags, sums)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_significant_faults_of_the_pooling_itself(mode):
    torch.manual_seed(0)
    table = torch.randn(50, 20)
    ids = torch.randint(0, 50, (900,))
    bags = Bags([ids], [torch.arange(0, 900, 3)], mode=mode)
    native, out = checked.bag_library(planted=True), torch.empty(300, 1, 20)
    sums = [checked.table_sums(table)]
    checked.pool_into(out, [table], bags, sums, planted=True)
    for column in range(20):
        native.plant(0, 13 * column, column, 30)
        with pytest.raises(Corruption, match="pooled"):
            checked.pool_into(out, [table], bags, sums, planted=True)
    native.plant(-1, 0, 0, 0)
    checked.pool_into(out, [table], bags, sums, planted=True)


def layers_of(widths, dtype, last="none"):
    made = []
    for i, o in zip(widths[:-1], widths[1:], strict=True):
        weight = (torch.randn(o, i) / i**0.5).to(dtype)
        made.append(
            mlp.Layer(weight, torch.randn(o).to(dtype), "relu" if o != widths[-1] else last)
        )
    return made


@settings(max_examples=50)
@given(
    widths=st.lists(st.sampled_from([1, 2, 13, 16, 33, 100]), min_size=2, max_size=4),
    size=st.sampled_from([0, 1, 2, 9, 31, 130, 400, 1100]),
    dtype=DTYPES,
    last=st.sampled_from(["none", "relu", "sigmoid", "gelu"]),
    threads=st.integers(1, 4),
    shift=st.sampled_from([0.0, 5.0]),
    seed=st.integers(0, 2**31),
)
def test_products_are_the_same_bits_and_raise_no_alarm(
    widths, size, dtype, last, threads, shift, seed
):
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    layers = layers_of(widths, dtype, last)
    x = (torch.randn(size, widths[0]) + shift).to(dtype)
    sums = [checked.weight_sums(layer.weight) for layer in layers]
    packed = [mlp.Layer(linear.pack(a.weight), a.bias, a.activation) for a in layers]
    for form in (layers, packed):
        assert torch.equal(checked.mlp(x, form, sums), mlp.mlp(x, form))


def test_no_alarm_where_rounding_is_worst():
    """All of one sign, very wide, and numbers of very different sizes."""
    torch.manual_seed(0)
    for inputs, outputs in ((3000, 1), (1, 3000), (2000, 2000)):
        for weight in (torch.rand(outputs, inputs) + 0.5, torch.full((outputs, inputs), 0.3),
                       torch.exp(4 * torch.randn(outputs, inputs))):  # fmt: skip
            layer = mlp.Layer(weight, None, "none")
            for x in (
                torch.rand(8, inputs),
                torch.full((8, inputs), 0.7),
                torch.exp(5 * torch.randn(8, inputs)),
            ):
                checked.mlp(x, [layer], [checked.weight_sums(weight)])


@pytest.mark.parametrize("size", [3, 300])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_flip_in_a_weight_or_in_a_product(size, layer):
    torch.manual_seed(1)
    layers = layers_of((40, 70, 33, 2), torch.float32, "sigmoid")
    sums = [checked.weight_sums(a.weight) for a in layers]
    x = torch.rand(size, 40)
    weight = layers[layer].weight
    used = mlp.reference(x, layers[:layer]).abs().amax(0).argmax().item()
    flip(weight, weight.shape[1] + used, 30)  # the top bit of the exponent
    with pytest.raises(Corruption) as found:
        checked.mlp(x, layers, sums)
    assert found.value.kind == "product" and found.value.table == layer
    flip(weight, weight.shape[1] + used, 30)
    native = checked.mlp_library(planted=True)
    native.plant(layer, size - 1, 1, 30)
    with pytest.raises(Corruption, match=f"layer {layer} .*row {size - 1} "):
        checked.mlp(x, layers, sums, planted=True)
    native.plant(-1, 0, 0, 0)
    checked.mlp(x, layers, sums, planted=True)


def test_rows_that_are_not_finite_are_let_through():
    layers = layers_of((4, 3, 2), torch.float32)
    x = torch.tensor([[1.0, float("nan"), 0, 0], [float("inf"), 1, 1, 1], [1.0, 2, 3, 4]])
    out = checked.mlp(x, layers, [checked.weight_sums(a.weight) for a in layers])
    assert not out[:2].isfinite().all() and out[2].isfinite().all()


# The option


@pytest.fixture(scope="module")
def compiled():
    model = model_of().eval()
    return model, compiler.compile(model, checksums=True), compiler.compile(model)


def test_the_option_changes_no_result(compiled):
    _, verified, plain = compiled
    with torch.no_grad():
        for size in (1, 6, 300):
            inputs = batch(BASE, size).inputs()
            assert torch.equal(verified(*inputs), plain(*inputs))


def test_the_option_finds_flips_and_goes_on_after_them(compiled):
    model, verified, _ = compiled
    inputs = batch(BASE, 50).inputs()
    with torch.no_grad():
        clean = verified(*inputs)
        weight = model.tables[1].bag.weight
        row = int(inputs[1][1][0])
        for tensor, place, kind in ((weight, row * weight.shape[1], "row"),
                                    (model.bottom[0].weight, 1, "product"),
                                    (model.top[0].weight, 0, "product")):  # fmt: skip
            flip(tensor, place, 30)
            with pytest.raises(Corruption) as found:
                verified(*inputs)
            assert found.value.kind == kind
            flip(tensor, place, 30)
        assert torch.equal(verified(*inputs), clean)


def test_changes_on_purpose_are_taken_over_once(compiled, monkeypatch):
    model, verified, plain = compiled
    inputs = batch(BASE, 20).inputs()
    taken = []
    made = checked._Known.__init__
    monkeypatch.setattr(
        checked._Known, "__init__", lambda self, *a: (taken.append(1), made(self, *a))[1]
    )
    with torch.no_grad():
        verified(*inputs)
        with torch.inference_mode():
            verified(*inputs)  # another graph, with sums of its own
        before = len(taken)
        verified(*inputs)
        with torch.inference_mode():
            verified(*inputs)
        assert len(taken) == before  # unchanged weights keep their sums
        for parameter in model.parameters():
            parameter.mul_(1.25)
        assert torch.equal(verified(*inputs), plain(*inputs))
        assert len(taken) > before
        state = {k: v * 0.8 for k, v in model.state_dict().items()}
        model.load_state_dict(state)
        assert torch.equal(verified(*inputs), plain(*inputs))


def test_a_single_product_and_frozen_weights():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.w = nn.Linear(8, 5), nn.Parameter(torch.randn(8, 3))

        def forward(self, x):
            return self.a(x).sum(1) + (x @ self.w).sum(1)

    torch.manual_seed(0)
    x = torch.randn(20, 8)
    for freeze in (False, True):
        net = Net().eval()
        with torch.no_grad():
            fast = compiler.compile(net, checksums=True, freeze=freeze)
            torch.testing.assert_close(fast(x), net(x))
            if not freeze:  # a frozen weight was copied: its source may be flipped at will
                for weight in (net.a.weight, net.w):
                    flip(weight, 2, 30)
                    with pytest.raises(Corruption):
                        fast(x)
                    flip(weight, 2, 30)
            torch.testing.assert_close(fast(x), net(x))


def test_training_verifies_products_and_says_what_it_does_not():
    model = model_of().train()
    inputs = batch(BASE, 40).inputs()
    fast = compiler.compile(model, checksums=True)
    with pytest.warns(UserWarning, match="embedding bags in training are not verified"):
        fast(*inputs).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01
    fast(*inputs).sum().backward()
    flip(model.top[0].weight, model.top[0].weight.shape[1] - 1, 30)
    with pytest.raises(Corruption, match="layer 0"):
        fast(*inputs)


def test_threads_may_share_a_compiled_model(compiled):
    _, verified, _ = compiled
    inputs = batch(BASE, 30).inputs()
    failed = []

    def work():
        try:
            with torch.no_grad():
                for _ in range(50):
                    verified(*inputs)
        except Exception as error:
            failed.append(error)

    pool = [threading.Thread(target=work) for _ in range(4)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert not failed


def test_what_cannot_be_verified_is_refused_by_name(tmp_path):
    with pytest.raises(PackageError, match="checksums"):
        compiler.save(model_of().eval(), batch(BASE, 4).inputs(), tmp_path / "m", checksums=True)
    assert not (tmp_path / "m").exists()


def test_explain_names_what_is_verified():
    with torch.no_grad():
        found = compiler.explain(model_of().eval(), *batch(BASE, 4).inputs(), checksums=True)
    text = next(t for name, t in found.stages.items() if "after fusion" in name)
    assert "checked embedding bags" in text and "checked mlp" in text
