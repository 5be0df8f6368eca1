"""The CUDA kernel in `cluster_divergence.cu`, and the rows that it supports."""

from __future__ import annotations

from .._cuda_kernel import FLOAT, INT32, INT64, TENSOR, CudaKernel

# Logits of each tensor in a thread block, and thread blocks of a cluster.
PART, CLUSTERS = 16384, (2, 4, 8)

cluster_divergence = CudaKernel(
    __name__,
    "cluster_divergence",
    {
        "p_z": TENSOR, "p_t": TENSOR, "p_dz": TENSOR, "p_target": TENSOR, "p_scale": TENSOR, "p_loss": TENSOR,
        "n_rows": INT32, "V": INT32, "stride_z": INT64, "stride_t": INT64, "stride_dz": INT64, "stride_scale": INT64,
        "ignore_index": INT64, "beta": FLOAT, "factor": FLOAT,
    },
    constants=("CLUSTER",), cluster="CLUSTER", threads=384, shared=220 * 1024, arch="sm_90a",
)  # fmt: skip


def cluster_of(vocabulary: int) -> int | None:
    """Thread blocks per row; None if a row is longer than the largest cluster, or fills less than 2/3 of its own.

    A row takes as long as a full one; below 2/3, `narrow_divergence_kernel` is as fast.
    """
    cluster = next((cluster for cluster in CLUSTERS if vocabulary <= cluster * PART), None)
    return cluster if cluster is not None and 3 * vocabulary >= 2 * cluster * PART else None
