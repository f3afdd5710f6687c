"""Run every example on two ranks and its plain twin in this process, and draw both: `python examples/gallery.py`."""

import argparse
import importlib
import sys
from pathlib import Path

import matplotlib.pyplot as plt

import ltx

HERE = Path(__file__).parent
# The file: what the numbers are that its main() returns, and by what.
PICTURES = {
    "train_gpt": ("loss", "step"),
    "shard_gpt": ("loss", "step"),
    "resnet_digits": ("loss", "step"),
    "hf_finetune": ("loss", "step"),
    "maml": ("loss after adapting", "step"),
    "dp_sgd": ("loss over all samples", "step"),
    "clip": ("loss", "step"),
    "fedavg": ("loss over all clients", "turn"),
    "hessian_spectrum": ("eigenvalue", "number"),
    "kfac": ("loss over all samples", "step"),
    "natural_gradient": ("loss over all samples", "step"),
    "curvature_penalty": ("loss with its penalty", "step"),
    "compare_hooks": ("loss", "step"),
}
SHARED = {"shard_gpt": "train_gpt"}  # the twins of others


def run(name, steps):
    """What main() of examples/{name}.py returns; all are imported as they are when started as a script."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    main = importlib.import_module(name).main
    return main() if steps is None else main(steps)


def draw(name, found, plain):
    """Curves of a run on two ranks, and of plain torch as dots."""
    what, by = PICTURES[name]
    curves = found if isinstance(found, dict) else {"ltx": found}
    figure, axes = plt.subplots(figsize=(4.2, 2.6), layout="constrained")
    for label, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, label=label, linewidth=1.2)
    every = max(1, len(plain) // 25)
    axes.plot(range(1, len(plain) + 1)[::every], plain[::every], "k.", markersize=4, label="plain torch, one process")
    axes.set(xlabel=by, ylabel=what)
    axes.legend(frameon=False, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    plt.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none"})  # the same curves give the same small file
    figure.savefig(HERE / "pictures" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], help="all of them if none is given")
    parser.add_argument("--steps", type=int, help="of each; its own number if not given")
    options = parser.parse_args()
    with ltx.Pool(2) as pool:
        for name in options.names or PICTURES:
            found = pool.run(run, name, options.steps)[0]
            draw(name, found, run(f"plain.{SHARED.get(name, name)}", options.steps))
            print(f"pictures/{name}.svg", flush=True)


if __name__ == "__main__":
    main()
