"""Which tests run when: one table. A path is below tests/ and names a folder, a file, or one test.

conftest.py turns two lists, DETAILS and NIGHTLY, into marks, which a test's parameters add to:
whether it runs in Triton's interpreter or in the emulator, and whether it runs native code. The
other lists are lanes:

python tests/helpers/lanes.py numbers kernels      prints their paths, for the Makefile
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

# What `make check` runs of `make test`: each op on the CPU's best instruction set (not in Triton's
# interpreter, nor in the emulator), each optimizer's rule, `fuse` on torch's classes, and what
# holds the code and the docs to their rules.
CHECK = (
    "contract",
    "ops/test_attention_few.py",
    "ops/test_batch_invariant.py",
    "ops/test_batch_norm.py",
    "ops/test_choice.py",
    "ops/test_experts.py",
    "ops/test_linear.py",
    "ops/test_product.py",
    "ops/test_quantize_8bit.py",
    "ops/test_residual.py",
    "ops/test_rotary.py",
    "ops/test_route.py",
    "ops/test_small_kernels.py",
    "optim/test_optim.py",
    "optim/test_optim_arguments.py",
    "optim/test_optim_conformance.py",
    "optim/test_optim_first_step.py",
    "optim/test_optim_gradients.py",
    "optim/test_optim_published.py",
    "optim/test_optim_rounding.py",
    "pytorch/test_autocast.py",
    "pytorch/test_cache.py",
    "pytorch/test_call_forms.py",
    "pytorch/test_fuse.py",
    "pytorch/test_fuse_plain.py",
    "pytorch/test_graph_patterns.py",
    "pytorch/test_nn.py",
    "pytorch/test_signatures.py",
    "tools/test_docs.py",
    "tools/test_docstrings.py",
    "tools/test_planted.py",
    "tools/test_rooms.py",
    "tools/test_walks.py",
)

# `make test` leaves these to `make test-details`, which `.ci/run` runs too. `make test` asks each
# question once; these ask it again of other models, forms, compilers and GPUs.
DETAILS = {
    # fuse: test_graph_fuse.py, test_fuse_plain.py, test_graph_forms.py and test_hand_written.py
    # have what is welded, and what it computes.
    "pytorch/test_fuse_layers.py": "welds with dropout or masks of their own, and torch's layers",
    "pytorch/test_fuse_logits.py": "every use of logits that are computed late",
    "pytorch/test_fuse_mutants.py": "forwards and conditions that differ a little from a weld's",
    "pytorch/test_fuse_odd.py": "odd modules",
    "pytorch/test_fuse_parts.py": "parts of a fused model, called in every way",
    "pytorch/test_graph_alone.py": "norms that differ a little, each by itself",
    "pytorch/test_graph_answers.py": "forwards that ask torch, or branch on numbers",
    "pytorch/test_graph_captures.py": "how Dynamo is used, in processes of its own",
    "pytorch/test_graph_experts.py": "mixtures of experts, and some that differ a little",
    "pytorch/test_graph_mutants.py": "forwards that differ a little, and changes after a call",
    "pytorch/test_graph_repeats.py": "layers that differ from those beside them",
    "pytorch/test_graph_shortcuts.py": "short ways of a capture against its long ones",
    # Compilers.
    "contract/test_random.py::test_compiled_calls_drop_as_eager_ones": "compiles",
    "contract/test_random.py::test_compiled_checkpoints_drop_the_same_twice": "compiles",
    "contract/test_transforms.py": "second, batched and recorded derivatives",
    "ops/test_losses_recorded.py": "losses in recorded and compiled graphs",
    "optim/test_optim_gradients.py::test_a_compiled_step_has_the_same_bits": "compiles",
    "pytorch/test_cache.py::test_a_compiled_call_is_whole": "compiles",
    "pytorch/test_torch.py::test_no_recompilation": "compiles",
    "pytorch/test_torch.py::test_the_automatic_choice_compiles": "compiles",
    "pytorch/test_torch.py::test_opcheck": "torch's own check of each op's schema and fakes",
    "pytorch/test_visible.py": "compiles each of Triton's kernels by Inductor",
    "tools/test_triton_aot.py": "compiles Triton's kernels for four GPUs",
    "ops/test_block_sparse_triton.py": "Triton's attention in its interpreter",
    "ops/test_attention_specialised.py": "attention's kernels for an H100",
    "optim/test_optim_cuda_cut.py": "CUDA's optimizers on rows that shards cut",
    "emulator": "tests of the emulator, not of what it runs",
    # Several processes: test_stack.py trains by each strategy, test_parallelize.py by declarations.
    "distributed/test_batch_norm_distributed.py": "a module's statistics over processes",
    "distributed/test_checkpoint_table.py": "every number of processes before and after",
    "distributed/test_checkpointing.py": "recomputation in recorded graphs",
    "distributed/test_exchanges.py": "what is sent, for several backwards and slow links",
    "distributed/test_experts_distributed.py": "experts over processes",
    "distributed/test_graph_distributed.py": "fused models in each strategy",
    "distributed/test_head.py": "heads whose words processes share",
    "distributed/test_optim_distributed.py": "optimizers' exchanges",
    "distributed/test_pipeline_stages.py": "schedules of pipelines",
    "distributed/test_plan_unknown.py": "models that no plan was written for",
    "distributed/test_planner.py::test_the_best_of_all_is_found": "tries all of a small space",
    "distributed/test_row_sharded.py": "layers cut by rows",
    "distributed/test_rules_distributed.py": "each optimizer's rule on shards",
    "distributed/test_saves.py": "saves in a file, by each declaration",
}

# Only `make nightly` runs these, for the reason given.
NIGHTLY = {
    "distributed/test_grid.py": "an annex: a mode of tensor parallelism that few ask for",
    "distributed/test_one_bit_distributed.py": "an annex; test_quantize_one_bit.py has the bits",
    "distributed/test_optim_distributed.py::test_processes_in_the_emulator_equal_one": (
        "test_optim_cuda_cut.py has these kernels on cut rows, and test_factored the exchanges"
    ),
    "distributed/test_parallelize.py::test_a_scenario_that_does_not_end_well": (
        "it waits for processes that hang, to check tests' own helpers"
    ),
    "distributed/test_plan_unknown.py::test_a_planned_block_compiles": "parts compile elsewhere",
    "distributed/test_rules_distributed.py::"
    "test_checkpoints_go_from_four_processes_to_one_and_to_two": "test_checkpoint_table.py does it",
    "ops/test_seeds.py::test_kernels_compile_with_a_seed_by_value": (
        "test_triton_aot.py compiles these kernels with a seed in memory"
    ),
    "pytorch/test_support.py::test_aotinductor": "compiles C++; test_export runs the same graph",
    "tools/test_bench_blocks.py::test_a_block_is_timed_before_and_after_fuse": "it times",
    "tools/test_docs.py::test_a_pages_processes_run": "the tests of distributed/ make these calls",
    "tools/test_gpu.py::test_a_fault_is_its_ops": "it waits for processes that hang",
    "tools/test_gpu.py::test_a_process_that_tells_nothing_is_ended": "it waits for one that hangs",
    "tools/test_gpu.py::test_scripts_run_to_their_end": "models train; other tests time and record",
    "tools/test_memory_over_calls.py": "a leak shows only after many calls",
    "tools/test_overhead.py::test_host_time_of_a_call": "it times",
    "tools/test_planted.py::test_what_finds_a_fault_of_a_kernel": "it checks the check, by a table",
    "tools/test_triton_slots.py::test_no_kernel_takes_more_instructions": (
        "it counts what test_triton_aot.py's table has compiled"
    ),
}

# Whether kernels are right: run on every CPU instruction set, and under sanitizers.
NUMBERS = (
    "contract/test_absent_lanes.py",
    "contract/test_determinism.py",
    "contract/test_oracle.py",
    "contract/test_random.py",
    "contract/test_shapes.py",
    "ops/test_batch_invariant.py",
    "ops/test_linear.py",
    "ops/test_product.py",
    "ops/test_losses.py",
    "ops/test_losses_gradients.py",
    "ops/test_losses_in_examples.py",
    "ops/test_losses_of_torch.py",
    "ops/test_losses_recorded.py",
    "ops/test_quantize_8bit.py",
    "ops/test_quantize_one_bit.py",
    "optim/test_optim.py",
    "optim/test_optim_cuda.py",
    "optim/test_optim_cuda_cut.py",
    "optim/test_optim_gradients.py",
    "optim/test_optim_published.py",
    "optim/test_optim_rounding.py",
)

# Others that call kernels: run under sanitizers.
KERNELS = (
    "contract/test_bad_bindings.py",
    "contract/test_bad_input.py",
    "contract/test_gradients.py",
    "ops/test_attention_few.py",
    "ops/test_experts.py",
    "ops/test_experts_triton.py",
    "ops/test_out_of_memory.py",
    "ops/test_rotary.py",
    "ops/test_rotary_triton.py",
    "ops/test_route_triton.py",
    "tools/test_plans.py::test_samples_have_the_bits_of_their_calls",
)

# What depends on torch's version: run under the oldest torch too.
OF_TORCH = (
    "contract/test_acceptance.py",
    "contract/test_bad_bindings.py",
    "contract/test_bad_input.py",
    "contract/test_declaration.py",
    "contract/test_gradients.py",
    "contract/test_oracle.py",
    "contract/test_random.py",
    "ops/test_batch_norm.py",
    "ops/test_choice.py",
    "ops/test_experts.py",
    "ops/test_linear_act_specialised.py",
    "ops/test_losses_of_torch.py",
    "ops/test_losses_recorded.py",
    "ops/test_product.py",
    "ops/test_residual.py",
    "ops/test_route.py",
    "ops/test_seams.py",
    "optim/test_optim.py",
    "optim/test_optim_arguments.py",
    "optim/test_optim_checkpoints.py",
    "optim/test_optim_conformance.py",
    "optim/test_optim_gradients.py",
    "pytorch",
    "tools/test_launchers.py",
    "tools/test_native.py",
    "tools/test_triton_aot.py",
)

# What asks torch by names that a release may change, most of them Dynamo's: `.ci/run` runs it under
# a newer torch than the pinned one. In torch 2.14 a flag had moved, and each fused model raised an
# error; no test ran there.
OF_NEW_TORCH = (
    "ops/test_losses_recorded.py",
    "pytorch/test_fuse.py",
    "pytorch/test_graph_answers.py",
    "pytorch/test_graph_captures.py",
    "pytorch/test_graph_fuse.py",
    "pytorch/test_graph_repeats.py",
    "pytorch/test_graph_shortcuts.py",
    "pytorch/test_support.py",
    "pytorch/test_visible.py",
    "tools/test_launchers.py",
    "tools/test_native.py",
)

# One of each kind of the tests of several processes: run under the oldest torch too.
OF_EACH_KIND = (
    "distributed/test_experts_distributed.py",
    "distributed/test_losses_distributed.py",
    "distributed/test_shards.py",
    "distributed/test_stack.py",
)

# The thin lanes of `.ci/run`: every kernel once, and what handles memory.
ORACLE = ("contract/test_oracle.py", "ops/test_product.py")
MEMORY = (
    "contract/test_freed_memory.py",
    "contract/test_shapes.py",
    "ops/test_product.py",
    "ops/test_small_kernels.py",
)

MARKS = {
    "details": (*DETAILS,),
    "nightly": (*NIGHTLY,),
}
LANES = {
    "check": CHECK,
    "oracle": ORACLE,
    "memory": MEMORY,
    "numbers": NUMBERS,
    "kernels": KERNELS,
    "of_torch": OF_TORCH,
    "of_new_torch": OF_NEW_TORCH,
    "of_each_kind": OF_EACH_KIND,
    "processes": ("distributed",),
}


def find_marks(path: str, name: str) -> Iterator[str]:
    """The marks of a test by its file below tests/ and its name with parameters."""
    function = name.partition("[")[0]
    for mark, listed in MARKS.items():
        if any(_holds(each, path, function) for each in listed):
            yield mark
    if "interpreter" in name:
        yield "interpreted"
    if "emulator" in name:
        yield "emulated"
    if not any(word in name for word in _NO_NATIVE_CODE):
        yield "native"


# Eager torch, references and compilers execute none.
_NO_NATIVE_CODE = ("interpreter", "compile", "[eager", "-eager", "of_the_reference")


def _holds(listed: str, path: str, function: str) -> bool:
    file, _, only = listed.partition("::")
    is_within = path == file or path.startswith(f"{file}/")
    return is_within and only in ("", function)


if __name__ == "__main__":
    print(*[f"tests/{path}" for lane in sys.argv[1:] for path in LANES[lane]])
