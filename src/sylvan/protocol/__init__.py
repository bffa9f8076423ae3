"""Types that cross a process: requests, messages, sampling parameters, errors."""
