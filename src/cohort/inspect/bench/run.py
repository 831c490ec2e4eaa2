"""Benchmarks of `cohort bench`, on a model from files or with random weights."""

from __future__ import annotations

from cohort.config.options import BenchOptions, BenchResult, EngineBenchOptions, LearnerBenchOptions
from cohort.errors import ModelError
from cohort.inspect.bench import measure
from cohort.jobs.build import configure_torch
from cohort.jobs.models import find_model
from cohort.models.config import check_context
from cohort.models.decoder import Decoder
from cohort.models.device import DTYPES, choose_device, choose_dtype
from cohort.models.files import load_folder
from cohort.models.shapes import find_shape, make_random_decoder


def bench_engine(options: EngineBenchOptions) -> BenchResult:
    """Loads the model that `options` name and returns the measurement that `measure.bench_engine` makes: sampling."""
    return measure.bench_engine(_load_model(options), options)


def bench_learner(options: LearnerBenchOptions) -> BenchResult:
    """Loads the model that `options` name and returns the measurement that `measure.bench_learner` makes: updates."""
    return measure.bench_learner(_load_model(options), options)


def bench_step(options: BenchOptions) -> BenchResult:
    """Loads the model that `options` name and returns the measurement that `measure.bench_step` makes: whole steps."""
    return measure.bench_step(_load_model(options), options)


def _load_model(options: BenchOptions) -> Decoder:
    """Sets the number of CPU threads and returns the model to be measured, on its device.

    Its weights are from files or random, as `options.weights` says. Raises ModelError for an unknown model, for random
    weights also if prompt and completion exceed the model's context, and for files that run on transformers' code
    instead of Cohort's own, because their hardware limit is not known.
    """
    device = choose_device(options.device)
    configure_torch(options.threads, device)
    dtype = DTYPES[choose_dtype(options.dtype, device)]
    if options.weights == "random":
        config = find_shape(options.model)
        check_context(config, options.prompt_tokens + options.completion_tokens)
        return make_random_decoder(config, dtype, str(device))
    decoder = load_folder(find_model(options.model).folder, dtype).decoder
    if not isinstance(decoder, Decoder):
        raise ModelError(
            f"{options.model} cannot be measured: Cohort runs it with transformers' code, so its hardware limit is not "
            "known. Choose a --model of another architecture, for example tiny."
        )
    return decoder.to(device)
