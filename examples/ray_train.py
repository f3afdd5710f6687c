"""ltx inside the workers of Ray Train: `pip install 'ray[train]'`.

    python examples/ray_train.py --workers 2

Ray starts the workers and makes their process group, and `ltx.init()` adopts it. Model and data are those of clip.py.
"""

import argparse
import tempfile
from pathlib import Path

import ray
import ray.train
from ray.train.torch import TorchTrainer


def loop(config):
    """What each worker runs."""
    import clip

    return clip.main(config["steps"])


def main(steps=200, workers=2):
    # Workers find clip.py where this file lies: on a cluster Ray copies the folder to all nodes.
    ray.init(runtime_env={"working_dir": str(Path(__file__).parent)}, num_cpus=workers)
    try:
        with tempfile.TemporaryDirectory() as results:
            trainer = TorchTrainer(
                loop,
                train_loop_config={"steps": steps},
                scaling_config=ray.train.ScalingConfig(num_workers=workers),
                run_config=ray.train.RunConfig(storage_path=results),
            )
            return trainer.fit().return_value  # of rank 0
    finally:
        ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(f"loss {main(options.steps, options.workers)[-1]:.4f}")
