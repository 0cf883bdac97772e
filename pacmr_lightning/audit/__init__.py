"""Label audits: the noise rate of preference pairs, and suspected label errors.

scorers -> scored_pairs -> noise_rate -> findings -> html_report; ``pipeline.audit`` runs all of it.
"""

from .options import AuditOptions
from .pipeline import AuditResult, audit

__all__ = ["AuditOptions", "AuditResult", "audit"]
