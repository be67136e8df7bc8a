"""Fills the dataclasses of `config` from a YAML file and dotted overrides, and writes them back.

Every mistake is a `ConfigError` of one line that names its source (the file or the override) and its key.
No module here imports jax: a bad configuration stops a run before a device is touched.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")

# Values that a person may look for, and why there are none: (end of the key, value) -> what the message adds.
_WITHHELD = {("sandbox.min_level", "none"): "; it confines nothing, and no configuration can ask for it"}


class ConfigError(ValueError):
    """A configuration that cannot run; the message is one line, meant for the person who wrote the configuration."""


def load(cls: type[T], path: Path | str | None = None, overrides: Iterable[str] = (), base: T | None = None) -> T:
    """Reads a configuration of class `cls`: defaults, then the YAML file, then overrides such as `optimizer.lr=1e-6`.

    `base` takes the place of the defaults. YAML interpolation (`${seed}`) works across the whole tree. Raises
    `ConfigError`.
    """
    base = cls() if base is None else base
    trees = [OmegaConf.create(as_tree(base))]  # interpolations reach defaults too
    if path is not None:
        trees.append(_read_file(cls, Path(path)))
    for override in overrides:
        trees.append(_read_override(cls, override))
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(*trees), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path or 'overrides'}: {_first_line(error)}") from error
    return _build(cls(), typing.cast(dict[str, Any], merged), str(path) if path is not None else "overrides", "")


def dump(config: Any) -> str:
    """The configuration as YAML text that `load` reads back to an equal object."""
    return OmegaConf.to_yaml(OmegaConf.create(as_tree(config)))


def as_tree(config: Any) -> dict[str, Any]:
    """The configuration as plain dicts, lists, strings and numbers."""
    return _plain(dataclasses.asdict(config))


def keys(cls: type, prefix: str = "") -> list[str]:
    """All dotted keys of a configuration class, depth first, in the order of its fields."""
    found = []
    for name, kind in _fields(cls).items():
        if dataclasses.is_dataclass(kind):
            found += keys(typing.cast(type, kind), f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _fields(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _read_file(cls: type, path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"configuration file {path} does not exist")
    try:
        tree = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:  # OSError: a bare number, or no right to read
        raise ConfigError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from error
    plain = OmegaConf.to_container(tree, resolve=False)
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: holds a list, not a mapping of {cls.__name__} keys")
    _check_keys(cls, plain, str(path), "")
    return tree


def _read_override(cls: type, override: str) -> Any:
    where = f"override {override!r}"
    name, equals, _ = override.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"{where}: overrides are written key=value, for instance optimizer.lr=1e-6")
    try:
        tree = OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{where}: {_first_line(error)}") from error
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    _check_keys(cls, plain, where, "")
    return tree


def _check_keys(cls: type, tree: Mapping[Any, Any], where: str, prefix: str) -> None:
    """Walks one source by itself, so that an error can name the source; interpolations are checked after the merge."""
    fields = _fields(cls)
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in fields:
            raise ConfigError(f"{where}: unknown key {key!r}{_hint(cls, str(name), key, prefix)}")
        if isinstance(value, str) and "${" in value:
            continue
        kind = fields[name]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {key} is a group of keys, not {_shown(value)}")
            _check_keys(typing.cast(type, kind), value, where, f"{key}.")
        elif not _interpolated(value):
            _convert(kind, value, where, key)


def _interpolated(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_interpolated(item) for item in value.values())
    if isinstance(value, list):
        return any(_interpolated(item) for item in value)
    return isinstance(value, str) and "${" in value


def _hint(cls: type, name: str, key: str, prefix: str) -> str:
    """The nearest valid key: a sibling, else the same name somewhere below this class, else all siblings."""
    siblings = list(_fields(cls))
    below = keys(cls, prefix)
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return f"; the nearest is {prefix + close[0]!r}"
    elsewhere = [full for full in below if full.rsplit(".", 1)[-1] == name]
    elsewhere = elsewhere or difflib.get_close_matches(key, below, n=1, cutoff=0.6)
    if elsewhere:
        return f"; the nearest is {elsewhere[0]!r}"
    return f"; valid here: {', '.join(siblings)}"


def _build(base: Any, tree: Mapping[str, Any], where: str, prefix: str) -> Any:
    """`base` with the values of `tree`: a group's default (the SFT learning rate) may differ from its class's."""
    fields = _fields(type(base))
    values: dict[str, Any] = {}
    for name, value in tree.items():
        kind, key = fields[name], prefix + name
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {key} is a group of keys, not {_shown(value)}")
            values[name] = _build(vars(base)[name], value, where, f"{key}.")
        else:
            values[name] = _convert(kind, value, where, key)
    return dataclasses.replace(base, **values)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _convert(kind: Any, value: Any, where: str, key: str) -> Any:
    """`value` as type `kind`; an int passes for a float, a list for a tuple, and nothing else is bent."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)

    def wrong(expected: str) -> ConfigError:
        return ConfigError(f"{where}: {key} must be {expected}, not {_shown(value)}")

    if kind is Any:
        return value
    if origin is Literal:
        # YAML reads a bare `on` or `off` as text here but as a truth value in other readers: accept both.
        named = {True: "on", False: "off"}.get(value) if isinstance(value, bool) else value
        if named not in arguments:
            close = difflib.get_close_matches(str(value), [str(item) for item in arguments], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            for (end, withheld), why in _WITHHELD.items():
                hint = why if value == withheld and key.endswith(end) else hint
            raise ConfigError(f"{where}: {key} must be one of {', '.join(map(str, arguments))}, not {value!r}{hint}")
        return named
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        inner = [argument for argument in arguments if argument is not type(None)]
        return _convert(inner[0], value, where, key)
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise wrong("a list")
        kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else list(arguments)
        if len(kinds) != len(value):
            raise wrong(f"a list of {len(kinds)} values")
        return tuple(
            _convert(each, item, where, f"{key}[{i}]") for i, (each, item) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is dict or kind is dict:
        if value is None:  # `data.options=null` empties what the file holds: mappings are merged, not replaced
            return {}
        if not isinstance(value, Mapping):
            raise wrong("a mapping")
        return {str(name): item for name, item in value.items()}
    if kind is bool:
        if not isinstance(value, bool):
            raise wrong("true or false")
        return value
    if kind is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong("a whole number")
        return value
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong("a number")
        if not abs(value) <= sys.float_info.max:  # comparisons with nan are all false: no check downstream sees one
            raise wrong("a finite number")
        return float(value)
    if kind is str:
        if value is None:  # `key:` in YAML, `key=` in an override
            return ""
        if isinstance(value, Mapping | list | bool):
            raise wrong("text")
        return str(value)
    raise TypeError(f"{key}: configuration classes cannot hold {kind}")
