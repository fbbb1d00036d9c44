"""Loads settings: YAML files chained by `base:`, then `section.key=value` from the command line.

    python -m jaxrl.train [file.yaml] section.key=value ...

Later sources win. Every error names the source, the key, the value and what was expected.
"""

import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from jaxrl.options import Config

__all__ = [
    "QUICKSTART",
    "Config",
    "ConfigError",
    "explained",
    "from_command_line",
    "load",
    "render_help",
    "to_json",
    "to_yaml",
]

QUICKSTART = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"
COMMAND_LINE = "the command line"

Keys = tuple[str, ...]
Values = dict[Keys, tuple[Any, str]]
"""Leaf settings: key path → (value, name of the source that set it)."""


class ConfigError(ValueError):
    """The settings are wrong; the message is for the person who wrote them."""


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Settings of `path` (the quickstart if None) and its bases, with `overrides` on top.

    Raises `ConfigError` for a file that can't be read, an unknown key or a value that doesn't fit.
    """
    values = _read_chain(Path(path) if path is not None else QUICKSTART, seen=())
    for override in overrides:
        _merge(values, _parse_override(override), COMMAND_LINE)
    try:
        return Config.model_validate(_nest(values))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail, values) for detail in _causes(error))) from None


def from_command_line(arguments: Sequence[str], *, command: str) -> Config:
    """Settings from a program's arguments: at most one YAML file, then `section.key=value`.

    For `-h` or `--help`, prints every setting with its value from the other arguments and exits 0; explains
    wrong settings and exits 2.
    """
    asked = {"-h", "--help"} & set(arguments)
    files = [argument for argument in arguments if "=" not in argument and argument not in asked]
    with explained(command):
        if len(files) > 1 or any(file.startswith("-") for file in files):
            raise ConfigError(
                f"expected at most one file.yaml, got {' '.join(files)}; settings are section.key=value"
            )
        config = load(*files, overrides=[argument for argument in arguments if "=" in argument])
    if asked:
        print(render_help(config, command))
        sys.exit(0)
    return config


@contextmanager
def explained(command: str) -> Iterator[None]:
    """Ends the program of `command` with status 2 and an explanation where settings turn out wrong."""
    try:
        yield
    except ConfigError as error:
        print(f"{error}\n({command} --help lists every setting)", file=sys.stderr)
        sys.exit(2)


def to_yaml(config: Config) -> str:
    """The resolved settings, such that loading them gives `config` again."""
    return yaml.safe_dump(json.loads(to_json(config)), sort_keys=False)


def to_json(config: Config) -> str:
    """The resolved settings as JSON."""
    return config.model_dump_json(indent=2)


def render_help(config: Config, command: str) -> str:
    """Help of a `python -m` command: every setting with its value in `config`, meaning and other default."""
    lines = [
        f"usage: {command} [file.yaml] [section.key=value ...]",
        "",
        "Without a file: the quickstart. Values are those in force with the other arguments given here;",
        "in brackets: the default, for a file that does not set the key.",
        "",
    ]
    values = config.model_dump(mode="json")
    for name, field in Config.model_fields.items():
        kind = _section(field.annotation)
        assert kind is not None
        lines.append(f"{name}: {(kind.__doc__ or '').splitlines()[0]}")
        lines += _help(name, kind, values[name])
    return "\n".join(lines)


def _help(prefix: str, kind: type[BaseModel], values: Mapping[str, Any] | None) -> Iterator[str]:
    """A line for each setting of a section; one that is null shows its keys without values."""
    for key, field in kind.model_fields.items():
        name, inner = f"{prefix}.{key}", _section(field.annotation)
        value = None if values is None else values[key]
        if inner is None or value is None:
            default = "" if inner else json.dumps(field.default)
            shown = name if values is None else f"{name}={json.dumps(value)}"
            note = "" if values is not None and (inner or json.dumps(value) == default) else f" [{default}]"
            yield f"  {shown:<42} {field.description}{note}"
        if inner is not None:
            yield from _help(name, inner, value)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, or may hold."""
    kinds = get_args(annotation) or (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _read_chain(path: Path, seen: tuple[Path, ...]) -> Values:
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"`base:` goes in a circle: {' -> '.join(map(_show, (*seen, path)))}")
    content = _read_file(path)
    base = content.pop("base", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"base = {base!r} in {_show(path)}: expected the name of a YAML file")
    values = _read_chain(path.parent / base, (*seen, path)) if base else {}
    _merge(values, content, _show(path))
    return values


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"can't read {_show(path)}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{_show(path)} is not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{_show(path)}: expected sections with keys, got {type(content).__name__}")
    return content


def _parse_override(text: str) -> dict[str, Any]:
    """`section.key=value` as the nested content of a file."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} on {COMMAND_LINE}: expected section.key=value")
    try:
        content = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"{key} = {value!r} on {COMMAND_LINE}: expected a YAML value; quote it") from None
    for part in reversed(_qualify(key.split("."))):
        content = {part: content}
    return content


def _qualify(keys: list[str]) -> list[str]:
    """`steps` means `run.steps`."""
    return ["run", *keys] if len(keys) == 1 and keys[0] not in Config.model_fields else keys


def _leaves(content: Mapping[Any, Any], prefix: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, value in content.items():
        keys = (*prefix, str(key))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, keys)
        elif prefix or value is not None:  # a section with nothing in it changes nothing
            yield keys, value


def _merge(values: Values, content: Mapping[Any, Any], source: str) -> None:
    """Sets every leaf of `content`; what stands above or below a leaf gives way to it."""
    for keys, value in _leaves(content):
        for old in [old for old in values if old[: len(keys)] == keys or keys[: len(old)] == old]:
            del values[old]
        values[keys] = (value, source)


def _nest(values: Values) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for keys, (value, _) in values.items():
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = value
    return tree


def _causes(error: ValidationError) -> list[ErrorDetails]:
    """The errors that stand at the leaves: a broken item also makes its list invalid."""
    details = error.errors()
    places = [detail["loc"] for detail in details]
    return [
        detail
        for detail, place in zip(details, places, strict=True)
        if not any(other != place and other[: len(place)] == place for other in places)
    ]


def _explain(detail: ErrorDetails, values: Values) -> str:
    location = tuple(str(part) for part in detail["loc"])
    source = _source(location, values)
    name = ".".join(location)
    where = f"{'on' if source == COMMAND_LINE else 'in'} {source}"
    if detail["type"] == "extra_forbidden":
        return f"unknown key {name} {where}; {_suggest(location)}"
    message = detail["msg"].removeprefix("Input should be ")
    if detail["type"] == "model_type":
        message = "a section with keys"
    return f"{name} = {detail['input']!r} {where}: expected {message}"


def _source(location: Keys, values: Values) -> str:
    """Who set the value at `location`, something in it, or the list that it is in."""
    return next(
        source for keys, (_, source) in values.items() if keys[: len(location)] == location[: len(keys)]
    )


def _suggest(location: Keys) -> str:
    """The nearest name among those that could stand there, or all of them."""
    known = _names_beside(location)
    nearest = difflib.get_close_matches(location[-1], known, n=1)
    return f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(known)}"


def _names_beside(location: Keys) -> list[str]:
    model: type[BaseModel] = Config
    for key in location[:-1]:
        inner = _section(model.model_fields[key].annotation)
        assert inner is not None
        model = inner
    return list(model.model_fields)


def _show(path: Path) -> str:
    """Relative to the working directory where that is shorter to read."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
