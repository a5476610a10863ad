"""The workers of one run: which were lost, which continue, and the command lines of those."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from provision.jobs.child import Child
from provision.jobs.fleet import HostWorker
from provision.jobs.store import WORKERS, ProcessSpec
from provision.jobs.units import INTERRUPTED, WORKER_LOST

Worker = Child | HostWorker
_MISTAKES = (1, 2)  # exit statuses of the trainer that starting again would not change


def failed(worker: Worker) -> bool:
    """Whether it ended otherwise than at the end of training, or as it was told to."""
    return worker.poll() not in (None, 0, INTERRUPTED)


def is_silent(worker: Worker) -> bool:
    """Whether its host does not answer."""
    return isinstance(worker, HostWorker) and worker.silent


def was_lost(worker: Worker) -> bool:
    """Whether it was killed or its host does not answer; not if it ended by a mistake or another's loss."""
    return is_silent(worker) or (failed(worker) and worker.poll() not in (*_MISTAKES, WORKER_LOST))


def has_mistake(worker: Worker) -> bool:
    """Whether it ended with an error that it would have again."""
    return worker.poll() in _MISTAKES and not is_silent(worker)


def rest(specs: Sequence[ProcessSpec], lost: Collection[str]) -> list[ProcessSpec]:
    """The workers that continue without `lost` (names), by rank; none if training cannot continue.

    The first one's host has the run directory. So if the first is lost, it is started there again, and the
    last one beside it gives way.
    """
    left = [spec for spec in specs if spec.name not in lost]
    first = specs[0]
    if first.name not in lost:
        return left
    beside = [spec for spec in left if spec.host == first.host]
    return [first, *(spec for spec in left if spec is not beside[-1])] if beside else []


def commands(
    specs: Sequence[ProcessSpec], everyone: Sequence[ProcessSpec], words: Mapping[str, str]
) -> list[list[str]]:
    """The command lines of `specs`, which are some of `everyone`; `words` are replaced where they stand."""
    ranks = [everyone.index(spec) for spec in specs]
    found = []
    for rank, spec in enumerate(specs):
        own, scripts = _parts(spec)
        found.append([*(words.get(word, word) for word in _of_rank(own, rank, ranks)), *scripts])
    return found


def with_words(spec: ProcessSpec, argv: Sequence[str], more: Sequence[str]) -> list[str]:
    """The command line with more words of the trainer's own, before the arguments of a script."""
    scripts = _parts(spec)[1]
    own = argv[: len(argv) - len(scripts)]
    return [*own, *more, *scripts]


def _parts(spec: ProcessSpec) -> tuple[list[str], list[str]]:
    """The trainer's own words, and what follows from ``--`` on: the script's, which stay as they are."""
    argv = spec.argv
    if spec.adapted or "--script" not in argv:
        return argv, []
    end = argv.index("--", argv.index("--script")) if "--" in argv[argv.index("--script") :] else len(argv)
    return argv[:end], argv[end:]


def _of_rank(argv: Sequence[str], rank: int, ranks: Sequence[int]) -> list[str]:
    """A worker's command line as number `rank` of the workers whose numbers were `ranks`."""
    words = list(argv)
    for place, word in enumerate(argv[:-1], start=1):
        if word == "--rank":
            words[place] = str(rank)
        elif word == "--workers" and words[place] != WORKERS:
            endpoints = words[place].split(",")
            words[place] = ",".join(endpoints[number] for number in ranks)
    return words
