"""What several test folders share: a fake engine in virtual time, and ways to drive the real daemon."""
