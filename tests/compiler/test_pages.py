"""Large pages: contents and addresses stay, and what cannot have them is left alone."""

import torch

from compiler.kernels import pages
from compiler.kernels.pages import use_huge_pages


def test_contents_and_addresses_stay():
    table = torch.randn(10**5, 16)
    around = table[1:-1]  # begins and ends inside a page
    copy, address = table.clone(), table.data_ptr()
    agreed = use_huge_pages([around])
    assert agreed % pages.PAGE == 0 and agreed < around.numel() * 4
    assert table.data_ptr() == address and torch.equal(table, copy)
    table.add_(1)
    assert torch.equal(table, copy + 1)


def test_small_strided_and_empty_tables_are_left_alone():
    large = torch.zeros(10**5, 32)
    given = [torch.ones(10, 4), large[:, :16], torch.empty(0, 8), large.to("meta")]
    assert use_huge_pages(given) == 0


def test_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("DLRM_COMPILER_HUGE_PAGES", "0")
    pages._madvise.cache_clear()
    try:
        assert use_huge_pages([torch.zeros(10**5, 32)]) == 0
    finally:
        pages._madvise.cache_clear()
