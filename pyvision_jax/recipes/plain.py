"""Any Python value as JSON data: numbers stay numbers, and what JSON cannot hold is marked. Never raises on a type.

Marks are one-key dicts, undone by `report.reader.restore`: `__float__` (nan, inf, -inf), `__bytes__`, `__set__`,
`__array__`; `__unheld__` names the type of what was left out (a picture, an object, a value too large or too deep).
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
from collections.abc import Mapping, Set
from pathlib import PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pyvision_jax.report.reader import encode_arrays

MAX_DEPTH = 16
MAX_INT_BITS = 8_192
MAX_BYTES = 64 * 1024  # of one bytes value or array; larger ones are marked with their size
MARKS = ("__float__", "__bytes__", "__set__", "__array__", "__unheld__", "__escaped__")


def plain(value: Any, depth: int = 0) -> Any:
    """JSON data that `json.dumps(allow_nan=False)` accepts."""
    if isinstance(value, enum.Enum):
        return plain(value.value, depth + 1)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float | np.floating):
        number = float(value)
        return number if math.isfinite(number) else {"__float__": str(number)}
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        number = int(value)  # Python refuses to print integers of more than some thousands of digits
        return number if number.bit_length() < MAX_INT_BITS else _unheld(value, bits=number.bit_length())
    if depth > MAX_DEPTH:
        return _unheld(value, why="nested too deep")
    if isinstance(value, Mapping):
        held = {_key(key): plain(item, depth + 1) for key, item in value.items()}
        return {"__escaped__": held} if len(held) == 1 and next(iter(held)) in MARKS else held
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, Set):
        items = [plain(item, depth + 1) for item in value]
        return {"__set__": sorted(items, key=lambda item: (str(type(item)), str(item)))}
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        if len(data) > MAX_BYTES:
            return _unheld(value, bytes=len(data))
        return {"__bytes__": base64.b64encode(data).decode("ascii")}
    if isinstance(value, jax.Array):
        if value.is_deleted():
            return _unheld(value, why="donated")
        if not value.is_fully_addressable:
            return _unheld(value, shape=list(value.shape), dtype=str(value.dtype))
        return plain(np.asarray(value))
    if isinstance(value, np.ndarray | np.generic):
        return _array(np.asarray(value))
    if isinstance(value, PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), depth + 1) for f in dataclasses.fields(value)}
    return _unheld(value)


def _array(value: np.ndarray) -> Any:
    if value.dtype.kind == "V" and jnp.issubdtype(value.dtype, jnp.floating):  # bfloat16 and the float8 kinds
        value = value.astype(np.float32)
    if value.dtype.kind not in "biufc" or value.nbytes > MAX_BYTES or (value.ndim == 0 and value.dtype.kind == "c"):
        return _unheld(value, shape=list(value.shape), dtype=str(value.dtype))
    if value.ndim == 0:
        return plain(value[()])
    packed = encode_arrays({"": value})
    return {"__array__": [packed["layout"][0][1], packed["layout"][0][2], packed["zlib"]]}


def _key(key: Any) -> str:
    if isinstance(key, str):
        return str(key)
    if isinstance(key, bool | int | float | np.bool_ | np.number) or key is None:
        return str(key)
    if isinstance(key, tuple):
        return "(" + ", ".join(_key(item) for item in key) + ")"
    return f"<{type(key).__module__}.{type(key).__qualname__}>"


def _unheld(value: Any, **details: Any) -> dict[str, Any]:
    return {"__unheld__": {"type": f"{type(value).__module__}.{type(value).__qualname__}", **details}}
