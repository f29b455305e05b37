"""Predicts: what one training step of a model costs on a system under a strategy, without running it.

Pure: no module here prints, logs, writes, or reads the environment. Imports `hardware` and nothing else of this
project. The sentence that the package says is `estimator.step.evaluate`.
"""
