"""Tunes a data-parallel job over its replayed graph: what to fuse, how to cut gradients, what to compute again.

The method is Algorithm 1 of dPRO (Hu et al., MLSys 2022, arXiv:2205.02473), with other drivers over the same passes.
Prices no operation and records nothing: jobs come from capture/traces, measured or of a model's size.
"""
