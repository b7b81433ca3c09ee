"""The one numerical rule: no op is further from float64 than transformers' own op on the same inputs."""

import torch


def error(result, exact) -> float:
    """Relative error in the 2-norm. NaN and Inf of the result must stand where they stand in `exact`."""
    result, exact = result.double(), exact.double()
    finite = exact.isfinite()
    assert torch.equal(finite, result.isfinite()), "non-finite elements differ"
    result, exact = result[finite], exact[finite]
    return float((result - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float64).tiny))


def assert_no_further(ours, theirs, exact):
    """`ours` has theirs' shape and dtype, and is no further from `exact` (float64) than `theirs`."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (ours.shape, ours.dtype, theirs.shape, theirs.dtype)
    # 1 % and one fp32 ulp: sums of thousands of terms in another order differ by that much.
    bound = 1.01 * error(theirs, exact) + 2.0**-23
    got = error(ours, exact)
    assert got <= bound, f"relative error {got:.3e}, transformers' {error(theirs, exact):.3e}, bound {bound:.3e}"
