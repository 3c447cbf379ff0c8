"""The work that an earlier NSA system reported figures of, done by this one."""
