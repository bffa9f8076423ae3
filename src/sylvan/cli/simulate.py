"""`sylvan simulate`: finds how many servers a load needs, without running any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sylvan.bench.results import append, check_writable, origin
from sylvan.bench.simulated import asked, settings_of, tokenizer_of
from sylvan.cli.help import simulate_markdown
from sylvan.cli.main import DONE, FAILED, Spec
from sylvan.cli.progress import counting_requests
from sylvan.config.env import config_file
from sylvan.config.fields import replaced
from sylvan.config.flags import Option, Parsed
from sylvan.config.load import dump
from sylvan.config.objectives import Bounds, bounds
from sylvan.config.schema import SIMULATE
from sylvan.config.simulate import SimulateConfig
from sylvan.config.sources import gather_as
from sylvan.protocol.errors import ConfigError
from sylvan.sim import measured as results_of
from sylvan.sim import table
from sylvan.sim.fleet import YOUNG_OBJECTS
from sylvan.sim.measured import MeasuredRequest
from sylvan.sim.page import about, page
from sylvan.sim.parallel import run_all
from sylvan.sim.profile import Profile, read
from sylvan.sim.scenarios import Result, Study, capacity_plans, scenarios
from sylvan.utils.garbage import freeze

SPEC = Spec(
    usage="simulate --model-profile FILE [flags]",
    doc="Simulate serving a data set or trace, with the real scheduler, cache and routing policies "
    "on a virtual clock and the step times of a recorded server (`sylvan simulate fit`), for "
    "each requested number of replicas, cache size and policy. Reports the smallest setup that "
    "meets --slo. Exit code 1 if none does.",
    options=(Option("markdown", "Print the reference of all settings."),),
    tree=SIMULATE,
    max_positions=0,
)


def run(args: Parsed) -> int:
    if args.has("markdown"):
        print(simulate_markdown(), end="")
        return DONE
    file = args.options.get("config") or config_file()
    config = gather_as(SIMULATE, args.given, file=file).config
    slo = _checked(config)
    profile = read(config.sim.profile)
    measured: MeasuredRequest | None = None
    if config.sim.against is not None:
        config, measured = _measured(config, config.sim.against)
    planned = scenarios(config.sim, config.load, profile)
    turns = asked(config.data, config.sim.tokenizer)
    sim = config.sim
    study = Study(
        profile,
        turns,
        slo,
        arrivals=config.data.seed,
        seed=sim.seed,
        scatter=sim.scatter,
        gateway_s=sim.gateway_ms / 1e3,
    )
    freeze(YOUNG_OBJECTS)  # the workload lives until the end
    # a progress bar has a thread, and processes are forked
    shown = counting_requests() if config.sim.jobs == 1 else nullcontext(_silent)
    with shown as progress:
        results = [*run_all(study, planned, config.sim.jobs, progress)]
    _print_reports(_Reports(config, profile, results, measured))
    served = all(result.figures["completed"] for result in results)
    meets_slo = not slo or all(each.meets_slo for each in capacity_plans(results, config.sim.share))
    return DONE if served and meets_slo else FAILED


def _silent(done: int, total: int) -> None:
    """Report no progress: scenarios run concurrently."""


def _checked(config: SimulateConfig) -> Bounds:
    """Return the SLO limits, after checking everything that needs no file."""
    if not config.sim.profile:
        raise ConfigError("sim.profile is missing: --model-profile FILE; see sylvan simulate fit")
    if config.load.timestamps and config.data.dataset != "trace":
        raise ConfigError("load.timestamps: only data.dataset trace has times")
    if config.load.timestamps and config.load.sweep:
        raise ConfigError("load.sweep cannot be combined with load.timestamps; use load.slowdown")
    if config.sim.against is not None and config.load != SimulateConfig().load:
        raise ConfigError("sim.against takes its load from the file; leave out load.*")
    if config.sim.against is not None and config.data != SimulateConfig().data:
        raise ConfigError("sim.against takes its data from the file; leave out data.*")
    for name, setting in ((config.result.file, "result.file"), (config.result.html, "result.html")):
        if name is not None:
            check_writable(name, setting)
    return bounds("sim.slo", config.sim.slo)


def _measured(config: SimulateConfig, name: str) -> tuple[SimulateConfig, MeasuredRequest]:
    """Return the configuration with data and load of a load test."""
    found = results_of.measured(name)
    data, load = settings_of(found, name)
    tokenizer = tokenizer_of(found, config.sim.tokenizer, name)
    config = replaced(config, {"sim.tokenizer": tokenizer})
    return SimulateConfig(sim=config.sim, data=data, load=load, result=config.result), found


@dataclass(frozen=True, slots=True)
class _Reports:
    """Receives all reports."""

    config: SimulateConfig
    profile: Profile
    results: Sequence[Result]
    measured: MeasuredRequest | None


def _print_reports(reports: _Reports) -> None:
    config, results = reports.config, reports.results
    print(table.table(results), flush=True)
    sentences = _sentences(reports)
    for sentence in sentences:
        print(sentence, flush=True)
    errors: dict[str, float] = {}
    if reports.measured is not None:
        errors = results_of.errors(results[0].figures, reports.measured.figures)
        print(table.comparison(results[0], reports.measured.figures, errors), flush=True)
    shown = dump(config, defaults=False, schema=SIMULATE)
    if config.result.file is not None:
        for result in results:
            append(config.result.file, _line(reports, result, shown, errors))
    if config.result.html is not None:
        more: dict[str, Any] = {"origin": origin()}
        if reports.measured is not None:
            more |= {"errors": errors}
        title = f"Simulation of {reports.profile.origin.model or 'a model'}"
        text = page(title, results, sentences, about(reports.profile, shown, more))
        Path(config.result.html).expanduser().write_text(text)


def _sentences(reports: _Reports) -> list[str]:
    config, results = reports.config, reports.results
    found = table.warnings(results, reports.profile)
    for result in results:
        found += [
            f"{result.figures['replicas']} replicas: {count} requests failed: {error}"
            for error, count in sorted(result.errors.items())[:5]
        ]
    if config.sim.slo:
        share = config.sim.share
        found += [
            table.sentence(each, config.sim.slo, share) for each in capacity_plans(results, share)
        ]
    return found


def _line(
    reports: _Reports, result: Result, config: Mapping[str, Any], errors: Mapping[str, float]
) -> dict[str, Any]:
    """Return a scenario as a line of the results file, with the keys of load tests."""
    return {
        "tag": reports.config.result.tag,
        "backend": "simulation",
        "dataset_name": reports.config.data.dataset,
        "model": reports.profile.origin.model,
        **result.figures,
        "errors_against": dict(errors),
        "origin": origin(),
        "config": config,
    }
