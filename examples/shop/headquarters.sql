-- No unique key on the order: the reconciliation must find a double entry, instead of a constraint that prevents it.
create table ledger (
    entry bigint generated always as identity primary key,
    order_id text not null,
    invoice text not null,
    cents integer not null
);
