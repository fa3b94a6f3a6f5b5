"""python -m vcattn doctor | capture | sensitivity | bench | plot"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from .errors import Error, InvalidArgumentError
from .policy import DEFAULT_MIN_SEQLEN
from .recipe import split_specs


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import doctor

    return doctor()


def _capture(options: argparse.Namespace) -> int:
    from .capturing import capturing

    steps = None if options.steps is None else {int(step) for step in options.steps.split(",")}
    script = options.script[1:] if options.script[:1] == ["--"] else options.script
    if not script:
        raise ValueError("capture runs a script: vcattn capture --out DIR -- script.py ARGUMENTS")
    if not Path(script[0]).is_file():
        raise ValueError(f"capture runs a script: there is no file {script[0]}")
    block = capturing(
        options.out,
        layers=options.layers.split(","),
        steps=steps,
        min_seqlen=options.min_seqlen,
        limit=options.limit,
        num_steps=options.num_steps,
    )
    sys.argv = script
    sys.path.insert(0, str(Path(script[0]).parent))
    failed = False
    with block as files:
        try:
            runpy.run_path(script[0], run_name="__main__")
        except Exception:  # the script's own, which its author wants to see whole
            traceback.print_exc()
            failed = True
    print(f"{len(files)} calls captured in {options.out}")
    for reason, count in block.report.fallbacks.items():
        print(f"{count} left out: {reason}")
    return 0 if files and not failed else 1


def _sensitivity(options: argparse.Namespace) -> int:
    from .sensitivity import sensitivity

    found = sensitivity(options.captures, recipes=split_specs(options.recipes), rows=options.rows)
    policy = found.policy(options.tolerance)
    print(found)
    if options.json:
        found.save(options.json)
    if options.policy:
        policy.save(options.policy)
        print(f"policy for a tolerance of {options.tolerance}: {options.policy}")
    return 0


def _bench(options: argparse.Namespace) -> int:
    import torch

    from . import bench

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise RuntimeError("it is cpu or cuda")
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError) as error:  # no such device, or none of its kind in this torch
        raise InvalidArgumentError(f"device {device}: {str(error).splitlines()[0]}") from error
    if options.overhead:
        from .overhead import declined_samples, layer_seconds

        q, k, v = (torch.randn(1, 8, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
        print(f"Python layer: {1e6 * layer_seconds(q, k, v):.1f} microseconds a call, without the library's part")
        # On a CPU one token of one head, as torch's own work would hide the rest.
        cuda = torch.device(device).type == "cuda"
        for tokens in (77, 512, 1024, 2048, 4096) if cuda else (1,):
            shape = (1, 24 if cuda else 1, tokens, 128)
            q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
            plain, patched = (1e6 * min(samples) for samples in declined_samples(q, k, v))
            print(f"patch_sdpa at {tokens} tokens, left to torch: {patched:.2f} microseconds; without {plain:.2f}")
        return 0
    recipes = split_specs(options.recipes)
    shapes = [bench.Shape.parse(text) for text in options.shapes or ["1,2048,4,128"]]
    results = [r for shape in shapes for r in bench.bench(shape, recipes, device=device, repeats=options.repeats)]
    print(bench.table(results))
    if options.json:
        name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
        data = {"kind": "bench", "device": name, "dtype": "bfloat16", "results": [r._asdict() for r in results]}
        Path(options.json).write_text(json.dumps(data) + "\n")
    return 0


def _plot(options: argparse.Namespace) -> int:
    from .plot import plot

    plot(options.source, options.picture)
    print(options.picture)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vcattn", description="Low-bit attention for video diffusion")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    add("doctor", _doctor, "say what is installed and what runs here; exit code 1 when something is broken")

    capture = add("capture", _capture, "run a script and save q, k, v of its attention calls to .safetensors files")
    capture.add_argument("--out", required=True, help="folder of the files")
    capture.add_argument("--layers", default="*", help="patterns separated by commas, as in file names [*]")
    capture.add_argument("--steps", help="step indices separated by commas [all]")
    capture.add_argument(
        "--min-seqlen", type=int, default=DEFAULT_MIN_SEQLEN, help=f"leave shorter calls out [{DEFAULT_MIN_SEQLEN}]"
    )
    capture.add_argument("--limit", type=int, default=200, help="files at most [200]")
    capture.add_argument("--num-steps", type=int, help="of the run, to be written into the files")
    capture.add_argument("script", nargs=argparse.REMAINDER, help="-- script.py and its arguments")

    measure = add("sensitivity", _sensitivity, "measure recipes on captured calls and propose a policy")
    measure.add_argument("captures", nargs="+", help="files or folders of `capture`")
    measure.add_argument("--recipes", default="fast,accurate,exact", help="fastest first [fast,accurate,exact]")
    measure.add_argument("--rows", type=int, default=1024, help="queries compared of each call [1024]")
    measure.add_argument("--tolerance", type=float, default=0.02, help="relative L2 error of a call [0.02]")
    measure.add_argument("--policy", help="write the policy to this .json file")
    measure.add_argument("--json", help="write the measurements to this .json file")

    bench = add("bench", _bench, "time whole calls beside torch's scaled_dot_product_attention")
    bench.add_argument("shapes", nargs="*", help="batch,seqlen,num_heads,head_dim or a model's name [1,2048,4,128]")
    bench.add_argument("--recipes", default="accurate", help="specs separated by commas [accurate]")
    bench.add_argument("--device", help="cpu or cuda [cuda where there is one]")
    bench.add_argument("--repeats", type=int, default=20, help="samples of each [20]")
    bench.add_argument("--overhead", action="store_true", help="time the Python layer alone")
    bench.add_argument("--json", help="write every sample to this .json file")

    plot = add("plot", _plot, "draw the JSON of `bench` or `sensitivity`")
    plot.add_argument("source", help=".json file")
    plot.add_argument("picture", help=".png, .svg or .pdf file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; 0, or 1 with one line on standard error."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (Error, ImportError, OSError, ValueError) as error:
        print(f"vcattn: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
