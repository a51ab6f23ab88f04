"""The cases of ``kernel_cases.py`` by name: its import imports Triton, which then interprets or compiles for good."""

NAMES = (
    "adamw_of_lists",
    "sum_of_squares_of_lists",
    "squares_do_not_overflow",
    "messages_of_lists",
    "cross_entropy_of_tiles",
    "cross_entropy_of_many_words",
    "a_target_out_of_range_is_not_a_number",
    "an_unknown_reduction_is_an_error",
)
