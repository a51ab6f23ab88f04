"""The cases of ``kernel_cases.py`` by name: its import imports Triton, which then interprets or compiles for good."""

NAMES = (
    "adamw_of_lists",
    "sum_of_squares_of_lists",
    "squares_do_not_overflow",
    "messages_of_lists",
    "means_of_lists",
    "wires_of_rows",
    "wires_of_any_bytes",
    "sums_of_wires",
    "wires_round_to_even",
)
