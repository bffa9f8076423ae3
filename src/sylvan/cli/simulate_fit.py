"""`sylvan simulate fit`: fits the step costs of a recorded server, for `sylvan simulate`."""

from __future__ import annotations

from sylvan.bench.results import check_writable
from sylvan.cli.main import DONE, Spec
from sylvan.config.flags import Option, Parsed
from sylvan.protocol.errors import ConfigError

SPEC = Spec(
    usage="simulate fit RECORDING [--results FILE] -o PROFILE",
    doc="Read the recording of `sylvan serve --record RECORDING` during a load test by `sylvan "
    "bench serve --output FILE --output-details`, and write a profile: the scheduler's setup, "
    "the cost of steps, and the time of requests outside the scheduler. Without --results, the "
    "latter is 0.",
    options=(
        Option("out", "File to write the profile to.", metavar="PROFILE", short="o"),
        Option("results", "Results of the recorded load test.", metavar="FILE"),
    ),
    tree=None,
)


def run(args: Parsed) -> int:
    from sylvan.sim import measured, profile, table  # `--help` needs no numpy
    from sylvan.sim.fit import fit
    from sylvan.sim.observed import observe
    from sylvan.sim.request_fit import fit_request_cost

    if not args.positions:
        raise ConfigError(f"RECORDING is missing; usage: sylvan {SPEC.usage}")
    out = args.options.get("out")
    if out is None:
        raise ConfigError(f"-o is missing; usage: sylvan {SPEC.usage}")
    check_writable(out, "-o")
    observed = observe(args.positions[0])
    found = fit(observed)
    if (results := args.options.get("results")) is not None:
        found = fit_request_cost(found, measured.measured(results), observed, results)
    profile.write(found, out)
    print(table.described(found))
    return DONE
