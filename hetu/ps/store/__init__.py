"""The whole parameter server without sockets: consistency, rules, tables, messages, and caches."""
