"""The compiled CPU kernel: right, and the same for a row whatever surrounds it."""

import logging
import sys
from pathlib import Path

import pytest
import torch

from workers.native.models.cpu_kernel import CpuKernel, build_cpu_kernel, load_cpu_kernel
from workers.native.models.errors import KernelUnavailableError
from workers.native.models.projection import PanelProjection, PlainProjection


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> CpuKernel:
    return build_cpu_kernel(tmp_path_factory.mktemp("kernels"))


def parts(inner: int, *outer: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(inner + sum(outer))
    return [torch.randn(out, inner, generator=generator) for out in outer]


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 100, 200])
@pytest.mark.parametrize("inner, outer", [(8, (64,)), (100, (64, 192)), (576, (576, 64, 64))])
def test_products(kernel: CpuKernel, rows: int, inner: int, outer: tuple[int, ...]) -> None:
    weights = parts(inner, *outer)
    projection = PanelProjection(kernel, weights)
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows))
    exact = x.double() @ torch.cat(weights).double().t()
    error = (projection(x).double() - exact).abs().max()
    bound = 1e-6 * inner**0.5 * exact.abs().max()
    assert error < bound
    residual = torch.randn(rows, sum(outer))
    expected = residual.double() + exact
    assert (projection.add_to(residual, x).double() - expected).abs().max() < bound


def test_strided_rows_and_bias(kernel: CpuKernel) -> None:
    weights, bias = parts(48, 128), torch.randn(128)
    wide = torch.randn(9, 100)
    ours, plain = PanelProjection(kernel, weights, bias), PlainProjection(weights, bias)
    x = wide[:, 20:68]
    assert torch.allclose(ours(x), plain(x), atol=1e-5)
    start = torch.randn(9, 128)
    assert torch.allclose(ours.add_to(start.clone(), x), plain.add_to(start, x), atol=1e-5)
    assert ours.weight_bytes == plain.weight_bytes == 48 * 128 * 4


def test_columns_are_rows_of_the_embedding(kernel: CpuKernel) -> None:
    (table,) = parts(32, 256)
    tokens = torch.tensor([0, 63, 64, 255, 64])
    for projection in (PanelProjection(kernel, [table]), PlainProjection([table])):
        assert torch.equal(projection.columns(tokens), table[tokens])


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(kernel: CpuKernel) -> None:
    projection = PanelProjection(kernel, parts(576, 576))
    weight = torch.rand(576)
    x = torch.randn(150, 576, generator=torch.Generator().manual_seed(3))
    whole, normed = projection(x), kernel.rms_norm(x, weight, 1e-5)
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            for first, last in ((0, 1), (149, 150), (7, 9), (90, 101), (0, 150)):
                assert torch.equal(projection(x[first:last]), whole[first:last])
                some = kernel.rms_norm(x[first:last], weight, 1e-5)
                assert torch.equal(some, normed[first:last])
        finally:
            torch.set_num_threads(before)


def test_norm_of_strided_heads(kernel: CpuKernel) -> None:
    packed = torch.randn(5, 10 * 32)
    heads = packed[:, 64:256].view(5, 6, 32)
    weight = torch.rand(32)
    expected = torch.nn.functional.rms_norm(heads, (32,), weight, 1e-6)
    assert torch.allclose(kernel.rms_norm(heads, weight, 1e-6), expected, atol=1e-6)


def test_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_cpu_kernel(tmp_path)
    (library,) = tmp_path.glob("*.so")
    compiled_ns = library.stat().st_mtime_ns
    build_cpu_kernel(tmp_path)
    assert library.stat().st_mtime_ns == compiled_ns
    assert list(tmp_path.glob("*.o")) == []


def test_without_a_compiler_the_reason_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(KernelUnavailableError, match="install gcc or set CC"):
        build_cpu_kernel(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load_cpu_kernel(tmp_path) is None
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(KernelUnavailableError, match=r"broken-cc failed \(out of order\)"):
        build_cpu_kernel(tmp_path)
    assert list(tmp_path.glob("*.so")) == []


def test_other_systems_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(KernelUnavailableError, match="Linux only"):
        build_cpu_kernel(tmp_path)


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("heads, kv_heads, dim", [(9, 3, 64), (4, 1, 256), (2, 2, 16)])
def test_paged_attention(
    kernel: CpuKernel, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    draw = torch.Generator().manual_seed(heads)
    pool = torch.randn(12, 2, 8, kv_heads, dim, generator=draw)  # 12 blocks of 8 tokens
    keys, values = pool[:, 0], pool[:, 1]
    lengths = torch.tensor([1, 17, 40])
    table = torch.tensor([[3, 0, 0, 0, 0], [7, 1, 9, 0, 0], [2, 11, 4, 8, 10]])
    packed = torch.randn(3, (heads + 2 * kv_heads) * dim, generator=draw)
    query = packed[:, : heads * dim].view(3, heads, dim)
    key = packed[:, heads * dim : (heads + kv_heads) * dim].view(3, kv_heads, dim)
    value = packed[:, (heads + kv_heads) * dim :].view(3, kv_heads, dim)
    before = pool.clone()

    def attend(rows: list[int]) -> torch.Tensor:
        return kernel.attend_paged(
            *(query[rows], key[rows], value[rows]),
            pages=(keys, values),
            table=table[rows],
            lengths=lengths[rows],
            longest=int(lengths[rows].max()),
            scale=0.125,
            window=window,
        )

    together = attend([0, 1, 2])
    for row in range(3):
        length = int(lengths[row])
        k = keys[table[row]].flatten(0, 1)[:length]
        v = values[table[row]].flatten(0, 1)[:length]
        assert torch.equal(k[-1], key[row])
        assert torch.equal(v[-1], value[row])
        first = 0 if window is None else max(0, length - window)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[row].unsqueeze(1).double(),
            k[first:].transpose(0, 1).double().repeat_interleave(heads // kv_heads, 0),
            v[first:].transpose(0, 1).double().repeat_interleave(heads // kv_heads, 0),
            scale=0.125,
        )
        assert (together[row].double() - expected.flatten()).abs().max() < 2e-6
        assert torch.equal(attend([row])[0], together[row])
    written = {3: 0, 9: 0, 10: 7}
    for block, offset in written.items():
        before[block, :, offset] = pool[block, :, offset]
    assert torch.equal(pool, before)
