# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in the field, on a real engine: each case is prevented, or refused with the old weights intact.

One child process an engine runs all cases of its family (`_field_jobs`); here each case is a test of its own. A
case that kills its process, or leaves the engine wrong, fails alone.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration import _field_jobs

pytestmark = pytest.mark.vllm

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = REPOSITORY / ".artifacts" / "checkpoints"
CACHE = Path(os.environ.get("WEIGHTLIFE_TESTING_CACHE") or REPOSITORY / ".artifacts" / "oracle")

# Compiled engines take a minute each.
SLOW = frozenset({"qwen2tied-compiled"})


@functools.cache
def verdicts(job: str) -> dict[str, Any]:
    """Run a job once; its verdicts by row."""
    return _field_jobs.run(job, ROOT, CACHE)


def right(job: str, row: str) -> None:
    verdict = verdicts(job).get(row)
    assert verdict is not None, f"{row} never ran"
    assert not verdict["problems"], "\n".join([_field_jobs.ROWS[row].__doc__ or row, *verdict["problems"]])
    assert verdict["checks"], "the row compared nothing with a cold load"


def families(row: str) -> list[Any]:
    jobs = [name for name, job in _field_jobs.JOBS.items() if row in job.rows]
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in jobs]


def case(row: str) -> Any:
    """Parametrise over the jobs that have this row."""
    return pytest.mark.parametrize("job", families(row))


@case("by_path")
def test_reload_by_path_is_exact(job: str) -> None:
    right(job, "by_path")


@case("by_iterator")
def test_reload_by_iterator_is_exact(job: str) -> None:
    right(job, "by_iterator")


@case("dummy_by_iterator")
def test_after_a_dummy_load_a_reload_by_iterator_is_exact(job: str) -> None:
    right(job, "dummy_by_iterator")


@case("dummy_by_path")
def test_after_a_dummy_load_a_reload_by_path_works_or_changes_nothing(job: str) -> None:
    right(job, "dummy_by_path")


@case("transfer_session")
def test_transfer_session_in_shuffled_buckets_is_exact_and_survives_a_failed_bucket(job: str) -> None:
    right(job, "transfer_session")


@case("reload_per_bucket")
def test_one_reload_per_bucket_is_refused(job: str) -> None:
    right(job, "reload_per_bucket")


@case("raw_load_weights")
def test_bare_load_weights_is_exact(job: str) -> None:
    right(job, "raw_load_weights")


@case("fails_then_valid")
def test_a_failed_update_leaves_nothing_behind(job: str) -> None:
    right(job, "fails_then_valid")


@case("wrong_shape")
def test_wrong_shape_is_named_and_the_next_reload_is_clean(job: str) -> None:
    right(job, "wrong_shape")


@case("iterator_raises")
def test_requests_in_flight_survive_a_source_that_raises(job: str) -> None:
    right(job, "iterator_raises")


@case("missing_member")
def test_missing_member_of_a_fused_layer_is_refused(job: str) -> None:
    right(job, "missing_member")


@case("duplicate_without_others")
def test_duplicate_in_place_of_other_members_is_refused(job: str) -> None:
    right(job, "duplicate_without_others")


@case("duplicate_first")
def test_duplicate_before_everything_never_leaves_a_stale_value(job: str) -> None:
    right(job, "duplicate_first")


@case("wrong_dtype")
def test_eight_bit_tensors_for_a_wide_weight_are_refused(job: str) -> None:
    right(job, "wrong_dtype")


@case("nan_refused")
def test_non_finite_values_are_refused_by_name(job: str) -> None:
    right(job, "nan_refused")


@case("nan_episode")
def test_a_nan_episode_ends_with_the_next_good_weights(job: str) -> None:
    right(job, "nan_episode")


@case("empty")
def test_an_empty_update_is_no_success(job: str) -> None:
    right(job, "empty")


@case("two_threads")
def test_two_threads_reload_and_one_is_refused(job: str) -> None:
    right(job, "two_threads")


@case("reload_in_reload")
def test_a_reload_inside_a_reload_is_refused(job: str) -> None:
    right(job, "reload_in_reload")


@case("source_reads_model")
def test_a_source_that_reads_the_model_is_refused_or_sees_what_serves(job: str) -> None:
    right(job, "source_reads_model")


@case("processing_twice")
def test_processing_again_changes_nothing(job: str) -> None:
    right(job, "processing_twice")


@case("kernel_format")
def test_kernel_format_is_exact_or_refused(job: str) -> None:
    right(job, "kernel_format")


@case("prefix_cache")
def test_old_cache_blocks_do_not_answer_in_silence(job: str) -> None:
    right(job, "prefix_cache")


@case("no_false_warning")
def test_a_good_update_logs_no_warning(job: str) -> None:
    right(job, "no_false_warning")


@case("odd_tensors")
def test_layouts_subclasses_and_things_that_are_no_tensors(job: str) -> None:
    right(job, "odd_tensors")


@case("odd_sources")
def test_sources_that_reuse_reenter_and_end_strangely(job: str) -> None:
    right(job, "odd_sources")


@case("odd_loaders")
def test_loaders_that_begin_to_behave_otherwise(job: str) -> None:
    right(job, "odd_loaders")


@case("half_an_expert")
def test_a_loader_that_treats_one_expert_otherwise(job: str) -> None:
    right(job, "half_an_expert")


@case("changed_between")
def test_user_code_that_works_on_the_model_between_updates(job: str) -> None:
    right(job, "changed_between")


@case("hooks_that_load")
def test_hooks_that_load_begin_end_or_abort(job: str) -> None:
    right(job, "hooks_that_load")


@case("interrupted_anywhere")
def test_ctrl_c_at_many_moments(job: str) -> None:
    right(job, "interrupted_anywhere")


@case("threads_at_once")
def test_two_threads_by_every_pair_of_ways(job: str) -> None:
    right(job, "threads_at_once")


def test_every_row_has_a_test() -> None:
    planned = {row for job in _field_jobs.JOBS.values() for row in job.rows}
    assert planned == set(_field_jobs.ROWS)
