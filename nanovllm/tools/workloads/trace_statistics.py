"""Statistics of public traces, from which `real_traffic.py` draws look-alikes. No request of a trace is in here.

azure-conv, azure-code: Azure LLM inference trace 2023, CC-BY 4.0, of Patel et al., "Splitwise: Efficient generative LLM
inference using phase splitting", ISCA 2024. mooncake: its conversation trace, Apache-2.0, of Qin et al., "Mooncake:
Trading More Storage for Less Computation", FAST 2025. Computed from the files of the repositories
Azure/AzurePublicDataset and kvcache-ai/Mooncake.
"""

from __future__ import annotations

from dataclasses import dataclass

Table = tuple[float, ...]  # quantiles at `PERCENTILES` of its length

# Percentiles of a table, by its number of quantiles.
PERCENTILES: dict[int, Table] = {
    7: (0, 10, 25, 50, 75, 90, 100),
    11: (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100),
    26: (0, 1, 2.5, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 97.5, 99, 99.9, 100),
}
RATE_PERCENTILES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99.5, 99.95)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Poisson arrivals with a rate that changes every second.

    rates: quantiles at `RATE_PERCENTILES` of a second's rate, relative to the mean.
    slow_share, slow_seconds, fast_seconds: share of the rate's variance that lasts `slow_seconds`; the rest lasts
        `fast_seconds`.
    """

    rates: Table
    slow_share: float
    slow_seconds: float
    fast_seconds: float


@dataclass(frozen=True, slots=True)
class Conversations:
    """Prompts that continue earlier ones. All prompts begin with one common block.

    block_tokens: tokens of a block; prompts share whole blocks.
    continuing: share of the requests that continue an earlier one.
    first_goes_on, later_goes_on: probability that a first turn, and a later one, is continued.
    ages: seconds since the earlier request.
    growths: tokens that a turn adds to the prompt of the turn before.
    rewritten: share of the long prompts (`LONG`) that are rewritten instead, from some block on.
    kept, ratios: share of the blocks kept, and length relative to the earlier prompt, of rewritten prompts.
    """

    block_tokens: int
    continuing: float
    first_goes_on: float
    later_goes_on: float
    ages: Table
    growths: Table
    rewritten: float
    kept: Table
    ratios: Table


LONG = 8192  # tokens from which on prompts are rewritten


@dataclass(frozen=True, slots=True)
class Trace:
    """Statistics of a trace.

    rate: requests per second.
    prompts: tokens of a prompt; with conversations, of a first turn.
    outputs: tokens of an output: a table for each of equal shares of the requests, by rising length of the prompt.
    """

    about: str
    rate: float
    arrivals: Arrivals
    prompts: Table
    outputs: tuple[Table, ...]
    conversations: Conversations | None = None


TRACES = {
    "azure-conv": Trace(
        about="Look-alike of Azure's conversation trace of 2023: lengths and arrivals; no prefixes.",
        rate=5.53,
        arrivals=Arrivals(
            (0.357, 0.652, 0.69, 0.766, 0.842, 0.899, 0.956, 1.051, 1.127, 1.222, 1.43, 1.517, 1.583, 1.62, 1.777),
            slow_share=0.75, slow_seconds=300.0, fast_seconds=1.0,
        ),
        prompts=(
            2, 29, 120, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189, 1315, 1876,
            2734, 4083, 4092, 4142, 6179, 14050,
        ),
        outputs=(
            (11, 12, 16, 66, 112, 161, 189, 217, 217, 294, 1000),
            (7, 14, 18, 18, 59, 76, 99, 162, 183, 217, 436),
            (36, 54, 73, 80, 88, 96, 110, 132, 144, 171, 200),
            (25, 51, 75, 81, 89, 98, 113, 140, 153, 200, 739),
            (10, 36, 58, 82, 122, 396, 415, 448, 516, 609, 921),
            (33, 64, 373, 379, 394, 406, 428, 478, 538, 667, 1000),
            (28, 51, 363, 376, 393, 407, 429, 501, 571, 662, 1000),
            (26, 42, 60, 92, 180, 396, 417, 452, 523, 643, 992),
            (15, 31, 44, 50, 70, 95, 138, 191, 233, 421, 918),
            (17, 26, 30, 35, 43, 58, 87, 132, 154, 256, 757),
        ),
    ),
    "azure-code": Trace(
        about="Look-alike of Azure's code trace of 2023: long prompts, short outputs, in bursts; no prefixes.",
        rate=2.567,
        arrivals=Arrivals(
            (0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 1.948, 3.507, 5.065, 8.572, 12.079, 22.819),
            slow_share=0.2, slow_seconds=60.0, fast_seconds=6.5,
        ),
        prompts=(
            3, 17, 44, 75, 147, 232, 386, 578, 770, 939, 1075, 1261, 1469, 1690, 1909, 2164, 2433, 2744, 3192, 3920,
            5188, 7303, 7435, 7436, 7437, 7437,
        ),
        outputs=(
            (6, 6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 55, 90, 145, 251, 825, 1899),
        ),
    ),
    "mooncake": Trace(
        about="Look-alike of Mooncake's conversation trace: long prompts that share prefixes in blocks of 512 tokens.",
        rate=3.4,
        arrivals=Arrivals(
            (0.766, 0.839, 0.855, 0.903, 0.952, 0.968, 1.001, 1.02, 1.049, 1.098, 1.143, 1.185, 1.258, 1.32, 1.37),
            slow_share=1.0, slow_seconds=90.0, fast_seconds=1.0,
        ),
        prompts=(891, 894, 897, 905, 1336, 5264, 13056, 25559, 38493, 89867, 126195),
        outputs=(
            (
                1, 3, 3, 10, 24, 46, 100, 156, 213, 256, 291, 322, 350, 375, 399, 423, 447, 472, 504, 543, 597, 698,
                835, 1119, 2000, 2000,
            ),
        ),
        conversations=Conversations(
            block_tokens=512, continuing=0.395, first_goes_on=0.45, later_goes_on=0.65,
            ages=(1, 13.4, 29.4, 41.4, 67.1, 122.5, 264.7, 482.5, 616.9, 1476, 3029),
            growths=(1, 1, 20, 63, 260, 471, 831, 4599, 7338, 16994, 91918),
            rewritten=0.25,
            kept=(0.02, 0.05, 0.1, 0.2, 0.5, 0.9, 0.98),
            ratios=(0.3, 0.55, 0.75, 0.9, 1.05, 1.25, 1.8),
        ),
    ),
}  # fmt: skip
