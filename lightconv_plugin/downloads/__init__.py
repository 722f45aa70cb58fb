"""Downloads that are resumable and checked, and archives unpacked safely."""
