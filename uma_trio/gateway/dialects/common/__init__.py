"""What several APIs share: parts of answers, tools, conversations, names of fields.  No dialect imports another one."""
