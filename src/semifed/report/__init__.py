"""What runs have to say: `report.html` of one, a comparison of many, the partition they trained on."""

from semifed.report.compare import Comparison, Row, Spread, compare_runs
from semifed.report.page import write_report
from semifed.report.partition import draw_partition, partition_table

__all__ = [
    "Comparison",
    "Row",
    "Spread",
    "compare_runs",
    "draw_partition",
    "partition_table",
    "write_report",
]
