"""Converts a checkpoint between the hub's layout and Orbax.

    python tools/convert_checkpoint.py INPUT OUTPUT --to hub      hub -> hub, names as published
    python tools/convert_checkpoint.py INPUT OUTPUT --to orbax    hub -> Orbax
    python tools/convert_checkpoint.py RUN/checkpoints/checkpoint_... OUTPUT --to hub --source HUB
                                                                  Orbax or training checkpoint -> hub

INPUT is a hub repository (config.json and safetensors) or a folder with Orbax weights under params/.
Vision and multi-token-prediction tensors, the config and the dtype of each tensor come from --source, by
default INPUT if that is a hub repository. Files beside the weights (tokenizer, chat template) are copied.
"""

import argparse
import shutil
from pathlib import Path

from jaxrl.model.hub import Layout, load_hub, save_hub
from jaxrl.model.hub_files import INDEX, SINGLE
from jaxrl.model.hub_orbax import PARAMS, load_orbax, save_orbax
from jaxrl.model.transformer import Transformer


def is_hub(directory: Path) -> bool:
    """Whether the folder holds safetensors, in one file or with an index."""
    return (directory / SINGLE).exists() or (directory / INDEX).exists()


def load(directory: Path, source: Path | None) -> Transformer:
    """The model in either form.

    Raises:
      FileNotFoundError: the folder holds neither.
    """
    if is_hub(directory):
        return load_hub(directory)
    if (directory / PARAMS).is_dir():
        own = directory / "config.json"
        config = own if own.exists() or source is None else source / "config.json"
        return load_orbax(directory, config=config)
    raise FileNotFoundError(f"{directory}: expected {SINGLE}, {INDEX} or a folder {PARAMS}; got none of them")


def copy_companions(source: Path, output: Path) -> None:
    """Files beside the weights: tokenizer, chat template, generation settings."""
    for path in sorted(source.iterdir()):
        weights = path.suffix == ".safetensors" or path.name in (INDEX, "config.json")
        if path.is_file() and not weights:
            shutil.copyfile(path, output / path.name)


def convert(given: Path, output: Path, *, to: str, source: Path | None, layout: Layout) -> None:
    """Reads `given` and writes `output`, which must be another folder.

    Raises:
      ValueError: the two are one folder.
      HubError, FileNotFoundError: see `load_hub` and `load_orbax`.
    """
    if output.resolve() == given.resolve():
        raise ValueError(f"expected an output other than the input; got {output} twice")
    model = load(given, source)
    if to == "orbax":
        return save_orbax(model, output)
    source = source or (given if is_hub(given) else None)
    save_hub(model, output, source=source, layout=layout)
    if source is not None and source.resolve() != output.resolve():
        copy_companions(source, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--to", choices=("hub", "orbax"), required=True)
    parser.add_argument("--source", type=Path, help="hub repository whose config and other tensors to keep")
    parser.add_argument(
        "--layout", choices=("hub", "source"), default="hub", help="published names, or those of the source"
    )
    given = parser.parse_args()
    try:
        convert(given.input, given.output, to=given.to, source=given.source, layout=given.layout)
    except (ValueError, OSError) as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
