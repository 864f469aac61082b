"""A run as plain values, to be made again in a process that shares no memory with this one; nothing is pickled."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedalloy.core import registry
from fedalloy.core.imports import Imports
from fedalloy.core.training import Local
from fedalloy.core.version import VERSION
from fedalloy.core.wire import Items
from fedalloy.data import Dataset, Prepare, Split
from fedalloy.data.federation import Federation
from fedalloy.errors import FedAlloyError
from fedalloy.round.replica import Replicas
from fedalloy.round.runtime import ClientRuntime
from fedalloy.round.vault import Vault

ALIGNED = 64  # bytes, as torch does: bits may depend on it
PARTS = {"dataset": Dataset, "split": Split, "prepare": Prepare}

Array = NDArray[np.uint8]
Entry = tuple[str, str, tuple[int, ...]]  # key, dtype, shape


def plan_of(runtime: ClientRuntime) -> tuple[dict[str, Any], list[Array]]:
    """What it takes to make a client runtime again: plain values, and the arrays of its federation."""
    method = runtime.method
    facts, items = apart(runtime.federation)
    entries, arrays = packed(items)
    plan = {
        "versions": _versions(),
        "allowed": runtime.replicas.imports is not None,
        "paths": [os.getcwd(), *sys.path],
        "modules": sorted({type(piece).__module__ for piece in method}),
        "method": method.expression,
        "pieces": repr(method.pieces),
        "models": runtime.replicas.models,
        "precision": runtime.replicas.precision,
        "rounds": runtime.replicas.rounds,
        "local": asdict(runtime.local),
        "seed": runtime.seed,
        "on_global": runtime.on_global,
        "secret": runtime.secret,
        "federation": facts,
        "entries": entries,
    }
    return plan, arrays


def made(
    plan: Mapping[str, Any], arrays: Sequence[Array], device: torch.device, vault: Vault
) -> ClientRuntime:
    """The client runtime that a plan describes."""
    if (mine := _versions()) != plan["versions"]:
        raise FedAlloyError(f"the cluster has {mine}, this machine {plan['versions']}: the bits would differ")
    sys.path += [path for path in plan["paths"] if path not in sys.path]
    importlib.invalidate_caches()
    expression, method = plan["method"], None
    imports = Imports() if plan["allowed"] else None
    try:
        for module in plan["modules"]:
            importlib.import_module(module)
        method = registry.make(expression, imports)
    except (ImportError, FedAlloyError) as error:
        why = str(error)
    else:
        why = "it comes out different"
    if method is None or repr(method.pieces) != plan["pieces"]:
        raise FedAlloyError(
            f"{expression!r} cannot be made again in a Ray actor ({why}); "
            "put it into a module and name it 'package.module:function', or use --engine workers"
        )
    federation = together(plan["federation"], unpacked(plan["entries"], arrays))
    seed, models, inputs = plan["seed"], tuple(plan["models"]), federation.dataset.inputs
    replicas = Replicas(method, models, inputs, seed, plan["precision"], plan["rounds"], device, imports)
    for model in dict.fromkeys(models):
        replicas.named(model)
    local = Local(**plan["local"])
    return ClientRuntime(method, replicas, federation, local, vault, seed, plan["on_global"], plan["secret"])


def _versions() -> dict[str, str]:
    return {"fedalloy": VERSION, "torch": torch.__version__.partition("+")[0]}


def apart(federation: Federation) -> tuple[dict[str, Any], Items]:
    """A federation as plain values and tensors."""
    facts: dict[str, Any] = {}
    items: Items = {}
    for part, kind in PARTS.items():
        found = getattr(federation, part)
        if type(found) is not kind:
            raise FedAlloyError(f"the ray engine cannot place a {type(found).__name__}; use --engine workers")
        for name in (one.name for one in fields(kind)):
            value = getattr(found, name)
            (items if isinstance(value, Tensor) else facts)[f"{part}.{name}"] = value
    return facts, items


def together(facts: dict[str, Any], items: Items) -> Federation:
    """The inverse of `apart`."""
    values = {**facts, **items}
    made = {
        part: kind(**{one.name: values[f"{part}.{one.name}"] for one in fields(kind)})
        for part, kind in PARTS.items()
    }
    return Federation(**made)


def packed(items: Items) -> tuple[list[Entry], list[Array]]:
    """Tensors as raw bytes, with what is needed to read them."""
    entries = [(key, str(v.dtype).removeprefix("torch."), tuple(v.shape)) for key, v in items.items()]
    arrays = [v.detach().contiguous().reshape(-1).view(torch.uint8).numpy() for v in items.values()]
    return entries, arrays


def unpacked(entries: list[Entry], arrays: Sequence[Array], *, copy: bool = False) -> Items:
    """Views of arrays, or copies; aligned as torch would."""
    items: Items = {}
    for (key, name, shape), array in zip(entries, arrays, strict=True):
        dtype = getattr(torch, name)
        if array.size:
            raw = torch.tensor(array) if copy or array.ctypes.data % ALIGNED else torch.from_numpy(array)
            items[key] = raw.view(dtype).view(shape)
        else:
            items[key] = torch.empty(shape, dtype=dtype)
    return items
