"""The same training over several processes: ``torchrun --nproc-per-node N -m dlrm.train ...``.

TorchRec shards the embedding tables (`tables`, `plan`), DDP or FSDP keep the dense layers in step
(`model`), and `trainer` is the plain trainer with collectives where one process had a plain value.
Every process reads the same batches and takes its part of each, so that the run is the one that a
single process would make, up to the order of sums.

Source: Ivchenko et al. 2022, "TorchRec: a PyTorch domain library for recommendation systems".
"""
