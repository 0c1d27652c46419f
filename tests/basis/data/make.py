#!/usr/bin/env python3
"""Makes the .npy files beside it: residuals with a falling spectrum, and their PCA by NumPy's SVD.

residuals.npy   f32 [240, 24]: 24 directions of standard deviation 4 * 0.8^i about a mean of norm 10
mean.npy        f64 [1, 24]
components.npy  f64 [12, 24]: the first rows of Vh of (residuals - mean), the largest value of each positive
variance.npy    f64 [1, 24]: singular values squared over n - 1

Made once with NumPy 2.4.6; another version gives the same to about 1e-12.
"""
from pathlib import Path

import numpy as np

here = Path(__file__).parent
rng = np.random.default_rng(20260301)
n, d, k = 240, 24, 12
rotation, _ = np.linalg.qr(rng.standard_normal((d, d)))
mean = rng.standard_normal(d)
mean *= 10 / np.linalg.norm(mean)
rows = (mean + (rng.standard_normal((n, d)) * (4 * 0.8 ** np.arange(d))) @ rotation).astype(np.float32)
exact = rows.astype(np.float64)
centre = exact.mean(axis=0)
_, s, vh = np.linalg.svd(exact - centre, full_matrices=False)
vh *= np.sign(vh[np.arange(len(vh)), np.abs(vh).argmax(axis=1)])[:, None]
np.save(here / "residuals.npy", rows)
np.save(here / "mean.npy", centre[None])
np.save(here / "components.npy", vh[:k])
np.save(here / "variance.npy", (s**2 / (n - 1))[None])
