"""How a process that trains is set up."""

import platform

import torch

from semifed.process import keep_freed_memory, settle


def test_a_process_that_trains_has_one_thread() -> None:
    settle()
    assert torch.get_num_threads() == 1


def test_glibc_agrees_to_keep_freed_memory_and_others_are_left_alone() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
