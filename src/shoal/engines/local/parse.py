"""What is read of this engine: pages of log files, as every engine's are."""

from shoal.engines.log_pages import MAX_LINE, read_page, whole_lines

__all__ = ["MAX_LINE", "read_page", "whole_lines"]
