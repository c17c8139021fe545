"""Makes the representations of different networks similar (FedHeNN): kernel matrices, CKA, the Procrustes distance, the
mean kernel matrix K̄, and public examples.
"""

from polyfed.alignment.alignment_target import (
    AlignmentTarget,
    Distance,
    mean_kernel_features,
    mean_rbf_kernel,
    reduce_to_principal_components,
)
from polyfed.alignment.cka import cka, linear_cka, rbf_cka, rbf_kernel
from polyfed.alignment.procrustes import procrustes_distance
from polyfed.alignment.public_examples import draw_public_rows, noise_like
from polyfed.alignment.representations import compute_representations

__all__ = [
    "AlignmentTarget",
    "Distance",
    "cka",
    "compute_representations",
    "draw_public_rows",
    "linear_cka",
    "mean_kernel_features",
    "mean_rbf_kernel",
    "noise_like",
    "procrustes_distance",
    "rbf_cka",
    "rbf_kernel",
    "reduce_to_principal_components",
]
