"""The only module that imports optuna: a study that is asked and told in rounds, kept in a journal file.

Answers: which parameters to try next, given what was told. Knows nothing of what parameters mean or how they are
priced. The journal is Optuna's own (optuna-dashboard opens it), written once a round instead of once a field: eight
operations a trial with a wait for the disk each would cost more than pricing it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.study import StudyDirection
from optuna.trial import Trial, TrialState, create_trial

from search.space import Sampler
from search.study_journal import append_records, read_records

__all__ = ["Study"]

FINGERPRINT = "space"
POPULATION = 50  # of an evolutionary sampler: Optuna's default
MUTATION = 0.3  # of a parameter; Optuna's one in all of them repeated itself in every second trial
STARTUP = 16  # random trials before a model is fitted: one round


class Study:
    """Asked for parameters, told what they came to. The same seed and the same answers give the same questions.

    A sampler is made anew for each round, seeded by the seed and the number of trials so far: so a study that goes on
    from its journal asks what the uninterrupted one would have asked.
    """

    def __init__(
        self, path: Path, *, name: str, fingerprint: str, sampler: Sampler, seed: int, levels: Mapping[str, int],
        higher: Sequence[bool],
    ) -> None:  # fmt: skip
        """Opens the journal at `path`, or begins it. `levels`: of each parameter, 0 for a share in [0, 1].

        ValueError where the journal holds a study of another space.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._sampler, self._seed = sampler, seed
        self._space: dict[str, BaseDistribution] = {
            name: IntDistribution(0, n - 1) if n else FloatDistribution(0.0, 1.0) for name, n in levels.items()
        }
        self._journal = _Journal(path)
        storage = _replayed(path, self._journal)
        known = optuna.get_all_study_names(storage)
        directions = [StudyDirection.MAXIMIZE if up else StudyDirection.MINIMIZE for up in higher]
        if not known:
            self._study = optuna.create_study(storage=storage, study_name=name, directions=directions)
            self._study.set_user_attr(FINGERPRINT, fingerprint)
        elif known != [name]:
            raise ValueError(f"{path}: must hold the study {name!r}, but holds {known}; launch anew in another folder")
        else:
            self._study = optuna.load_study(storage=storage, study_name=name)
            self._require_same(path, fingerprint)
        self.is_new = not known
        """Whether nothing was journalled before: `enqueue`, then `flush`."""
        self._close_open_trials()

    def __len__(self) -> int:
        """Trials so far, told more than once or not."""
        return len(self._trials())

    def enqueue(self, parameters: Mapping[str, float]) -> None:
        """Parameters to ask for before any of the sampler's."""
        self._study.enqueue_trial(dict(parameters))

    def ask(self, num: int) -> list[tuple[Trial, dict[str, float]]]:
        """The next `num` trials with their parameters."""
        self._study.sampler = _make(self._sampler, self._seed, len(self))
        trials = [self._study.ask(self._space) for _ in range(num)]
        return [(trial, dict(trial.params)) for trial in trials]

    def tell(
        self, trial: Trial, values: Sequence[float], constraints: Mapping[str, float], about: Mapping[str, Any]
    ) -> None:
        """What a trial came to; `about` are user attributes for who looks at it."""
        for key, value in constraints.items():
            trial.set_constraint(key, value)
        for key, value in about.items():
            trial.set_user_attr(key, value)
        self._study.tell(trial, list(values))

    def add(
        self, like: Trial, values: Sequence[float], constraints: Mapping[str, float], about: Mapping[str, Any]
    ) -> None:
        """Another result of a trial's parameters; an evolutionary sampler counts it to the same generation.

        A Gaussian process is told the first alone.
        """
        if self._sampler is Sampler.GP:  # a process has one value at a point, and its cost grows with their cube
            return
        generation = {
            key: value for key, value in self._trials()[like.number].system_attrs.items() if key.endswith(":generation")
        }
        self._study.add_trial(
            create_trial(
                state=TrialState.COMPLETE,
                params=like.params,
                distributions=self._space,
                values=list(values),
                constraints=dict(constraints),
                user_attrs=dict(about),
                system_attrs=generation,
            )  # fmt: skip
        )

    def give_up(self, trial: Trial) -> None:
        """A trial that means nothing legal: it has no values, and samplers leave it out."""
        self._study.tell(trial, state=TrialState.FAIL)

    def flush(self) -> None:
        """When this returns, all that was told survives a crash."""
        self._journal.flush()

    def told(self) -> list[dict[str, float]]:
        """Parameters of every trial that was told values."""
        return [dict(trial.params) for trial in self._trials() if trial.state is TrialState.COMPLETE]

    def _trials(self) -> list[Any]:
        return self._study.get_trials(deepcopy=False)

    def _require_same(self, path: Path, fingerprint: str) -> None:
        found = self._study.user_attrs.get(FINGERPRINT)
        if found != fingerprint:
            raise ValueError(
                f"{path}: holds a study of another space or of other prices ({found}, here {fingerprint}); "
                "launch anew, and --warm takes its front along"
            )

    def _close_open_trials(self) -> None:
        """Trials that were asked and never told, since the process ended: nobody will tell them."""
        for trial in self._trials():
            if trial.state is TrialState.RUNNING:
                self._study.tell(trial.number, state=TrialState.FAIL)


class _Journal(BaseJournalBackend):
    """Optuna's journal file, held in memory and written a round at a time; the run folder has one writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._logs = read_records(path)
        self._written = len(self._logs)

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Records from a number on."""
        return iter(self._logs[log_number_from:])

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Keeps records for the next `flush`."""
        self._logs += logs

    def flush(self) -> None:
        """Puts them on disk."""
        if new := self._logs[self._written :]:
            append_records(self._path, new)
            self._written = len(self._logs)


def _replayed(path: Path, journal: _Journal) -> JournalStorage:
    """What the journal tells; ValueError where its records contradict each other."""
    try:
        return JournalStorage(journal)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: the records must make a study, but one does not fit ({type(error).__name__}: {error}); put the "
            "file right from a copy, or launch anew with --warm"
        ) from error


def _make(sampler: Sampler, seed: int, num_trials: int) -> optuna.samplers.BaseSampler:
    """The sampler of one round."""
    fresh = int(np.random.SeedSequence([seed, num_trials]).generate_state(1)[0])
    kinds = optuna.samplers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # NSGA-III and QMC
        match sampler:
            case Sampler.NSGA2:
                return kinds.NSGAIISampler(seed=fresh, population_size=POPULATION, mutation_prob=MUTATION)
            case Sampler.NSGA3:
                return kinds.NSGAIIISampler(seed=fresh, population_size=POPULATION, mutation_prob=MUTATION)
            case Sampler.TPE:
                return kinds.TPESampler(seed=fresh, n_startup_trials=STARTUP)
            case Sampler.GP:
                return kinds.GPSampler(seed=fresh, n_startup_trials=STARTUP, warn_independent_sampling=False)
            case Sampler.QMC:  # one sequence through all rounds: its place in it is in the journal
                return kinds.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)
        return kinds.RandomSampler(seed=fresh)
