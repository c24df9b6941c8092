"""What went wrong with ranks, and which of several failures is to blame.

root_cause        which failure is to blame (pure)
failure_patience  when that is known, so that ranks that wait can be freed
exit_diagnosis    a rank that ended without a word
memory_kills      whether the kernel's out-of-memory killer was it
secrets           values of the run's environment are blanked in failures
"""
