-- No key on the order: that each is booked once is not left to a constraint, and the books would show it.
create table ledger (
    entry bigint generated always as identity primary key,
    order_id text not null,
    invoice text not null,
    cents integer not null
);
