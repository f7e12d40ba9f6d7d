"""The command for checkpoints.

    python -m distributed.checkpoint ls DIR             list the checkpoints of a run
    python -m distributed.checkpoint verify DIR         compare each checkpoint with its manifest
    python -m distributed.checkpoint export DIR FILE    write only the weights, for torch.load;
                                                        for other programs, FILE.safetensors
    python -m distributed.checkpoint hash DIR           print one SHA-256 over the weights

DIR is a checkpoint or the folder of a run; for a run, export and hash use the newest intact one.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from distributed.checkpoint import CheckpointError, files, load, weights_hash


def _print_checkpoints(folder: Path, describe: Callable[[Path], str]) -> bool:
    """Print what `describe` says about each checkpoint, the oldest first.

    Returns whether any is damaged: `describe` raises CheckpointError if it finds that.
    """
    has_damage = False
    for path in files.candidates(folder)[::-1]:
        try:
            text = describe(path)
        except CheckpointError as error:
            text = f"damaged: {error}"
            has_damage = True
        print(f"{path.name:<14} {text}")
    return has_damage


def _describe(path: Path) -> str:
    """Return a checkpoint's size, date, validation loss, and which links lead to it.

    Raises CheckpointError if its manifest or progress.json is damaged.
    """
    manifest = files.read_manifest(path)
    loss = files.read_progress(path).get("validation_loss")
    size = sum(entry["size"] for entry in manifest["files"].values()) / 1e6
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest["saved"]))
    links = [n for n in ("latest", "best") if (path.parent / n).resolve() == path.resolve()]
    text = f"validation loss {loss:.4f}" if loss is not None else ""
    return f"{size:10.1f} MB   {saved}   {text:<24} {' '.join(links)}".rstrip()


def _verify(path: Path) -> str:
    """Compare a checkpoint's files with its manifest. Raises CheckpointError if one is damaged."""
    files.read_files(path)
    return "intact"


def _weights(folder: Path) -> dict[str, Tensor]:
    """Return the model's weights from a checkpoint, or from the newest intact one of a run."""
    state = load(folder, whole=False)
    assert state is not None  # main() found a checkpoint
    return dict(state.fetch({"model": state.model})["model"])


def export(weights: dict[str, Tensor], file: str) -> None:
    """Write weights with torch.save, or as safetensors if the file's name ends in .safetensors.

    Raises CheckpointError if the package safetensors is missing.
    """
    if not file.endswith(".safetensors"):
        torch.save(weights, file)
        return

    try:
        from safetensors.torch import save_file
    except ImportError:
        cure = "pip install safetensors, or export to a .pt file"
        raise CheckpointError(f"{file} needs safetensors; {cure}") from None

    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(whole, file, metadata={"format": "pt"})  # other programs expect this


def main(arguments: Sequence[str]) -> int:
    """Run the command line. Returns the exit code: 1 if verify finds damage, 2 for an error.

    Prints the error's first line to stderr.
    """
    try:
        if len(arguments) > 1 and not files.candidates(Path(arguments[1])):
            raise CheckpointError(f"{arguments[1]} holds no checkpoint; correct the path")
        match arguments:
            case ["-h" | "--help"]:
                print(__doc__)
            case ["ls", folder]:
                _print_checkpoints(Path(folder), _describe)
            case ["verify", folder]:
                return int(_print_checkpoints(Path(folder), _verify))
            case ["export", folder, file]:
                export(_weights(Path(folder)), file)
            case ["hash", folder]:
                print(weights_hash(_weights(Path(folder))))
            case _:
                usage = "ls DIR | verify DIR | export DIR FILE | hash DIR"
                print(f"usage: python -m distributed.checkpoint {usage}", file=sys.stderr)
                return 2
    except (OSError, RuntimeError) as error:  # CheckpointError, or an error of torch.save
        print(f"checkpoint: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0
