"""The largest eigenvalues of the Hessian of a loss over all ranks' samples, by Lanczos: no matrix is ever made.

    ltx run -n 2 examples/hessian_spectrum.py

A Hessian-vector product is forward mode over reverse mode through a data-parallel step, exact over all ranks.
"""

import argparse

import torch
from plain.hessian_spectrum import SHOWN, digits, trained
from torch.func import grad, jvp
from torch.nn.functional import cross_entropy

import ltx


def lanczos(product, start, turns):
    """Eigenvalues of the tridiagonal matrix of `turns` products, largest first (Golub, Van Loan, section 10.1)."""
    basis, diagonal, beside = [start / start.norm()], [], []
    for _ in range(turns):
        vector = product(basis[-1])
        diagonal.append(vector @ basis[-1])
        for _ in range(2):  # twice is enough to stay orthogonal
            vector = vector - torch.stack(basis).t() @ (torch.stack(basis) @ vector)
        beside.append(vector.norm())
        basis.append(vector / beside[-1])
    off = torch.stack(beside[:-1])
    return torch.linalg.eigvalsh(torch.stack(diagonal).diag() + off.diag(1) + off.diag(-1)).flip(0)


def main(steps=200, turns=60):
    model = trained(steps)

    @ltx.data_parallel
    def loss_fn(params, x, y):
        return cross_entropy(ltx.functional_call(model, params, x), y)

    with ltx.init() as world:
        params = {name: p.detach() for name, p in model.to(world.device).named_parameters()}
        sizes = [p.numel() for p in params.values()]
        x, y = ltx.to_device(ltx.shard(digits()))  # this rank's samples

        def product(flat):
            parts = zip(params.items(), flat.split(sizes), strict=True)
            direction = {name: part.view_as(p) for (name, p), part in parts}
            _, out = jvp(lambda params: grad(loss_fn)(params, x, y), (params,), (direction,))
            return torch.cat([value.flatten() for value in out.values()])

        start = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        largest = lanczos(product, start.to(world.device), turns)[:SHOWN].tolist()
        if world.is_global_zero:
            print("largest eigenvalues: " + ", ".join(f"{value:.4f}" for value in largest))
    return largest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
