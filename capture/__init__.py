"""Observes: turns real models and real runs into the estimator's graphs.

The only room that may import torch and transformers, and only inside the modules that need them. Never imports
`results` or `search`.
"""
