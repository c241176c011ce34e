"""Keep secrets out of texts: redaction by their form, and known secrets in any form and in a process's output."""
