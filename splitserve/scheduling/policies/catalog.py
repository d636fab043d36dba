"""Policies by name: the project's own, the baselines, and any other by its import path.

`name`, `name:parameter` or `package.module:Class`. Underscores and hyphens are the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any, cast

from splitserve.scheduling.policies import Policy
from splitserve.scheduling.policies.cache_aware import CacheAware
from splitserve.scheduling.policies.capped import Capped
from splitserve.scheduling.policies.conductor import Conductor
from splitserve.scheduling.policies.dynamo import Dynamo
from splitserve.scheduling.policies.edf import EarliestDeadline
from splitserve.scheduling.policies.least_load import LeastLoad
from splitserve.scheduling.policies.least_requests import LeastRequests
from splitserve.scheduling.policies.least_work import LeastWork
from splitserve.scheduling.policies.llm_d import LlmD
from splitserve.scheduling.policies.llm_d_slo import LlmDSlo
from splitserve.scheduling.policies.lmetric import LMetric
from splitserve.scheduling.policies.poly_serve import PolyServe
from splitserve.scheduling.policies.power_of_two import PowerOfTwo
from splitserve.scheduling.policies.random_worker import RandomWorker
from splitserve.scheduling.policies.round_robin import RoundRobin
from splitserve.scheduling.policies.silo import Silo
from splitserve.scheduling.policies.slack import Slack, SlackSettings
from splitserve.scheduling.policies.static_pd import StaticPD
from splitserve.scheduling.policies.sticky import Sticky
from splitserve.scheduling.policies.trt_llm import TrtLlm

Maker = Callable[[str], Policy]  # from the text after the colon, "" when there is none


def names() -> tuple[str, ...]:
    """Names that `by_name` knows, as they are written in settings."""
    return tuple(_KNOWN)


def by_name(name: str) -> Policy:
    """Return a new policy. ValueError names the nearest known name, or what is wrong with a path.

    Importing a user's module runs it; nothing else in the core imports by name.
    """
    head, _, parameter = name.partition(":")
    maker = _KNOWN.get(head.replace("_", "-"))
    if maker is not None:
        try:
            return maker(parameter)
        except ValueError as error:
            raise ValueError(f"policy {name!r}: {error}") from error
    if parameter.isidentifier() and all(part.isidentifier() for part in head.split(".")):
        return _by_path(name, head, parameter)
    raise ValueError(f"policy {name!r} is unknown; {_nearest(head)}")


def _by_path(name: str, module_name: str, class_name: str) -> Policy:
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        hint = "" if "." in module_name else f"; {_nearest(module_name)}"
        raise ValueError(f"policy {name!r} cannot be imported: {error}{hint}") from error
    made = getattr(module, class_name, None)
    if not isinstance(made, type):
        raise ValueError(f"policy {name!r}: {module_name} has no class {class_name}")
    missing = [n for n in ("arrived", "left", "pump") if not callable(getattr(made, n, None))]
    if missing:
        lacks = ", ".join(missing)
        raise ValueError(f"policy {name!r} lacks {lacks}; subclass ImmediatePolicy or write them")
    try:
        return cast(Policy, made())
    except TypeError as error:
        raise ValueError(f"policy {name!r} must be made without arguments: {error}") from error


def _nearest(name: str) -> str:
    near = get_close_matches(name.replace("_", "-"), _KNOWN, n=1, cutoff=0.5)
    known = ", ".join(_KNOWN)
    return f"did you mean {near[0]!r}?" if near else f"known are {known}, and package.module:Class"


# --- what is known --------------------------------------------------------------------------------


def _plain(make: Callable[[], Policy]) -> Maker:
    def maker(parameter: str) -> Policy:
        if parameter:
            raise ValueError("it takes no parameter")
        return make()

    return maker


def _number(make: Callable[..., Policy], least: int = 0) -> Maker:
    def maker(parameter: str) -> Policy:
        if not parameter:
            return make()
        if not parameter.isdecimal() or int(parameter) < least:
            raise ValueError(f"its parameter is a whole number from {least} on")
        return make(int(parameter))

    return maker


def _choice(make: Callable[[], Policy], options: Mapping[str, Callable[[], Policy]]) -> Maker:
    def maker(parameter: str) -> Policy:
        made: Any = options.get(parameter) if parameter else make
        if made is None:
            raise ValueError(f"its parameter is one of {', '.join(options)}")
        return cast(Policy, made())

    return maker


def _edf_guarded() -> Policy:
    """Deadlines and guards, but a request that is late keeps its place in the queue."""
    return Slack(SlackSettings(relegate=False))


_KNOWN: dict[str, Maker] = {
    "slack": _plain(Slack),
    "least-work": _plain(LeastWork),
    "round-robin": _plain(RoundRobin),
    "random": _number(RandomWorker),
    "least-requests": _plain(LeastRequests),
    "power-of-two": _number(PowerOfTwo),
    "lmetric": _plain(LMetric),
    "cache-aware": _plain(CacheAware),
    "llm-d": _plain(LlmD),
    "llm-d-slo": _number(LlmDSlo),
    "sticky": _plain(Sticky),
    "least-load": _plain(LeastLoad),
    "trt-llm": _plain(TrtLlm),
    "dynamo": _choice(Dynamo, {"pools": partial(Dynamo, pools=True)}),
    "static-pd": _number(StaticPD),
    "always-local": _plain(StaticPD.never),
    "always-remote": _plain(StaticPD),
    "capped": _number(Capped, 1),
    "edf": _plain(EarliestDeadline),
    "edf-guarded": _plain(_edf_guarded),
    "silo": _plain(Silo),
    "conductor": _plain(Conductor),
    "poly-serve": _plain(PolyServe),
}
