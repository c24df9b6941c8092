"""What went wrong with ranks, and which of several failures is to blame.

reports_of_ranks  what ranks reported, secrets blanked, and which failure is to blame (pure); when that is known
exit_diagnosis    a rank that ended without a word, and whether the kernel's out-of-memory killer was it
"""
