"""Label audits: how many annotators would agree with the labels of preference pairs, and suspected errors.

scorers -> scored_pairs -> agreement -> suspected -> html_report; ``pipeline.audit`` runs all of it.
"""

from .options import AuditOptions as AuditOptions
from .pipeline import AuditResult as AuditResult
from .pipeline import audit as audit
