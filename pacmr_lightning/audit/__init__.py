"""Label audits: which labels of preference pairs look wrong, and how many are.

scorers -> scored_pairs -> noise_rate -> findings -> html_report; ``pipeline.audit`` is all of it.
"""

from .options import AuditOptions
from .pipeline import AuditResult, audit

__all__ = ["AuditOptions", "AuditResult", "audit"]
